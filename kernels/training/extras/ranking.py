"""SimCLS's loss for ranked candidates."""
import torch.nn.functional as F

from kernels import check_rows, checks


def ranking_loss(scores, reference, margin=0.01, form="paper"):
    """SimCLS: candidates of a text, best first, are to score in this order, and below the reference.

        Σ_i max(0, s_i − ref) + Σ_{i<j} max(0, s_j − s_i + (j − i) · margin), in the mean over texts

    scores      (B, C) of the candidates of B texts, any float type
    reference   (B,) of each text's reference, the same type
    margin      of candidates that follow each other
    form        "paper"; "code": the mean over candidates, and over the pairs of each distance j − i, for the
                sum, so that distant pairs weigh more
    returns     scalar
    source      Liu and Liu 2021, arXiv 2106.01890
    """
    check_rows(scores=(scores, "B C"), reference=(reference, "B"))
    checks.check_number("margin", margin)
    checks.check_choice("form", form, "paper", "code")
    hinges = [F.relu(scores - reference[:, None])]
    for apart in range(1, scores.shape[1]):
        hinges.append(F.relu(scores[:, apart:] - scores[:, :-apart] + apart * margin))
    return sum(hinge.sum(1).mean() if form == "paper" else hinge.mean() for hinge in hinges)
