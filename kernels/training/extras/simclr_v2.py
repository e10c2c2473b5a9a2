"""SimCLR v2's second and third stage (--finetune, --distill): a classifier behind the encoder instead of a
projection head, trained on one view of each picture."""
import torch.nn.functional as F
from torch import nn

from kernels import check_rows, checks, own_rows

from ..images.encoders import load_classifier, load_layers


def distillation_loss(logits, teacher_logits, temperature=1.0):
    """Mean over pictures of −Σ_y P_teacher(y) log P_student(y), both at one temperature.

    logits, teacher_logits    (N, C) of student and teacher, any float type; the teacher's get no gradient
    returns                   scalar of the student's type
    source                    Chen et al. 2020, SimCLR v2, distillation
    """
    check_rows(logits=(logits, "N C"), teacher_logits=(teacher_logits, "N C"))
    checks.check_temperature(temperature, logits.device)
    soft = (teacher_logits.detach() / temperature).softmax(1).to(logits.dtype)
    return F.cross_entropy(logits / temperature, soft)


class Tuning:
    """What is trained, and on what.

    teacher    the classifier that --distill names, whose soft labels are learnt; None: labels are
    classes    what the classifier tells apart
    """

    def __init__(self, args, pictures, run):
        self.args, self.pictures, self.teacher, self.classes = args, pictures, None, pictures.classes
        if args.distill:
            self.teacher = load_classifier(args.distill, "--distill", run).to(run.device)
            self.classes = self.teacher.classes

    def make_head(self, width):
        """The first --from-layer layers of --model's projection head, and a linear one that starts at
        zero."""
        kept = []
        if self.args.from_layer:
            kept, width = load_layers(self.args.model, self.args.from_layer)
        last = nn.Linear(width, len(self.classes))
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        return nn.Sequential(*kept, last)

    def compute_loss(self, model, rows):
        """This rank's part of the loss of the pictures `rows`, of all ranks: against the teacher's logits, or
        their labels."""
        views = next(self.pictures.feed)
        logits = model(views)
        if self.teacher:
            wanted = self.teacher.encode_batches([views], logits=True)
            loss = distillation_loss(logits, wanted, self.args.temperature)
        else:
            labels = self.pictures.train.labels[rows[own_rows(len(rows))]]
            loss = F.cross_entropy(logits, labels.to(logits.device))
        loss = loss * (len(logits) / len(rows))
        return loss, {"loss": loss.detach()}
