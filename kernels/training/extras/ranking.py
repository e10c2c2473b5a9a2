"""SimCLS's loss for ranked candidates."""
import torch.nn.functional as F

from kernels import check_rows, checks


def ranking_loss(scores, reference, margin=0.01, form="paper"):
    """SimCLS: the candidates of a text, given from best to worst, should score in this order, and below the
    reference.

        Σ_i max(0, s_i − ref) + Σ_{i<j} max(0, s_j − s_i + (j − i) · margin), averaged over texts

    scores      (B, C) scores of the C candidates of B texts, any float type
    reference   (B,) score of each text's reference, the same type
    margin      margin between consecutive candidates
    form        "paper": as above
                "code": the first sum becomes the mean over candidates. The second becomes, for each distance
                j − i, the mean over the pairs with this distance; these means are added. So pairs with a
                larger distance, of which there are fewer, weigh more
    returns     scalar
    source      Liu and Liu 2021, arXiv 2106.01890
    """
    check_rows(scores=(scores, "B C"), reference=(reference, "B"))
    checks.check_number("margin", margin)
    checks.check_choice("form", form, "paper", "code")
    hinges = [F.relu(scores - reference[:, None])]
    for distance in range(1, scores.shape[1]):
        hinges.append(F.relu(scores[:, distance:] - scores[:, :-distance] + distance * margin))
    return sum(hinge.sum(1).mean() if form == "paper" else hinge.mean() for hinge in hinges)
