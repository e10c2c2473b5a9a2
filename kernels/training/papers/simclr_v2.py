"""SimCLR v2's second stage (--finetune) and third stage (--distill): a classifier replaces the projection
head, and each image has one view."""
import torch
import torch.nn.functional as F
from torch import nn

from kernels import check_rows, checks, own_rows

from ..errors import fail
from ..images.encoders import load_classifier, load_head


def distillation_loss(logits, teacher_logits, temperature=1.0):
    """Return the mean over images of −Σ_y P_teacher(y) log P_student(y), P = softmax(logits / temperature).

    logits           (N, C) of the student, any float type
    teacher_logits   (N, C) of the teacher, any float type; they get no gradient
    returns          scalar of the student's type
    source           Chen et al. 2020 (SimCLR v2), distillation loss
    """
    check_rows(logits=(logits, "N C"), teacher_logits=(teacher_logits, "N C"))
    checks.check_temperature(temperature, logits.device)
    soft_labels = (teacher_logits.detach() / temperature).softmax(1).to(logits.dtype)
    return F.cross_entropy(logits / temperature, soft_labels)


def subsample(images, share):
    """Keep a random share of the training images of each class, at least one image. Seed: images.seed."""
    generator, labels = torch.Generator().manual_seed(images.seed), images.train.labels
    kept = []
    for rows in ((labels == label).nonzero()[:, 0] for label in labels.unique()):
        order = torch.randperm(len(rows), generator=generator)
        kept.append(rows[order[: max(1, round(share * len(rows)))]])
    images.train.keep_only(torch.cat(kept).sort().values.numpy())


def load_head_layers(name, count):
    """Load the first `count` linear layers of the head saved in a folder, each with the norm and activation
    that follow the layer. Return (modules, output dimension)."""
    head, _ = load_head(name)
    linear = [i for i, part in enumerate(head or ()) if isinstance(part, nn.Linear)]
    if count > len(linear):
        fail(f"--from-layer {count}: --model {name} has a head of {len(linear)} linear layers, expected more")
    return head[: [*linear, len(head)][count]], head[linear[count - 1]].out_features


class FinetuneOrDistill:
    """The head and the loss of --finetune or --distill.

    teacher    classifier of --distill: its soft predictions are the targets. With --finetune, the teacher is
               None, and the labels are the targets
    classes    names of the classes
    """

    def __init__(self, args, images, run):
        self.args, self.images = args, images
        self.teacher, self.classes = None, images.classes
        if args.distill:
            self.teacher = load_classifier(args.distill, "--distill", run).to(run.device)
            self.classes = self.teacher.classes

    def make_head(self, width):
        """Return the first --from-layer layers of --model's projection head, followed by a zero-initialised
        linear layer. The encoder has `width` features."""
        layers = []
        if self.args.from_layer:
            layers, width = load_head_layers(self.args.model, self.args.from_layer)
        last = nn.Linear(width, len(self.classes))
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        return nn.Sequential(*layers, last)

    def compute_loss(self, model, rows):
        """Compute the loss of the logits against the teacher's predictions or, without a teacher, the labels.
        Return this rank's part of the loss, and the values to log.

        rows   indices of the images in the batches of all ranks
        """
        views = next(self.images.training_views)
        logits = model(views)
        if self.teacher:
            teacher_logits = self.teacher.encode_batches([views], logits=True)
            loss = distillation_loss(logits, teacher_logits, self.args.temperature)
        else:
            labels = self.images.train.labels[rows[own_rows(len(rows))]]
            loss = F.cross_entropy(logits, labels.to(logits.device))
        loss = loss * (len(logits) / len(rows))
        return loss, {"loss": loss.detach()}
