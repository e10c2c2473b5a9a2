"""Evaluation of image encoders: accuracy of k nearest neighbours (kNN), and of a linear probe."""
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from kernels import similarity_topk

from ..errors import fail, log
from ..loop import batches, set_lr
from ..progress import progress
from ..run import Run
from . import encoders
from .dataset import ImageDataset
from .encoders import ImageEncoder, load_image_encoder


def evaluate_before(model, images, run):
    """Print the model's kNN accuracy before the first step. A resumed run prints the saved accuracy."""
    if images.test:
        if run.step == 0:
            run.log_initial_scores({"knn": evaluate_knn(model, images, run.impl)})
        log("before", f"kNN {run.extra_state['before']['knn']:.2f} % (k = {neighbours(images)})")


def evaluate_and_save(model, images, run, name="knn", score=None):
    """Evaluate the model, and save it even if the previous checkpoint has a better score: test images must
    not select the checkpoint. score: function (model, images) → the score `name`; None: evaluate_knn."""
    average_batch_statistics(model)
    score = score or functools.partial(evaluate_knn, impl=run.impl)
    scores = {name: score(model, images)} if images.test else {}
    if run.should_save(scores, shown="".join(f"{score:.2f}" for score in scores.values())):
        encoders.save_encoder(model, run, images.size)


def probe_text(images, args):
    """Return the text that announces the linear probe at the end of a run, or "" if there is none."""
    has_probe = images.test and args.probe_epochs
    return f", then {args.probe_epochs} epochs of a linear probe (--probe-epochs)" if has_probe else ""


def finish(model, images, run, linear_probe):
    """End a run: print the scores of the saved model, and a line of Python that loads it. linear_probe: the
    script's function that trains a linear probe on the model's features and returns its accuracy."""
    scores, best = "", run.extra_state["saved"]
    if images.test:
        scores = f"kNN {run.extra_state['before']['knn']:.2f} → {best['knn']:.2f} %, "
        if run.args.probe_epochs:
            scores += f"linear {linear_probe(model, images, run):.2f} %, "
    run.finish(scores)
    log("load", encoders.load_hint(model, run))


def average_batch_statistics(model):
    """Average the running statistics of batch norms over ranks, so that all ranks have the same model."""
    for name, statistic in model.named_buffers():
        if "running" in name and dist.is_initialized():
            dist.all_reduce(statistic)
            statistic /= dist.get_world_size()


def neighbours(images):
    """Return the number k of neighbours: 200, or the size of the smallest class if this is less, because
    more neighbours cannot all have the label of the query."""
    return min(200, int(images.train.labels.unique(return_counts=True)[1].min()))


def evaluate_knn(model, images, impl="auto"):
    """Return the kNN accuracy on the test images in percent. Each of the k nearest training images votes for
    its own label with the weight exp(cosine similarity / 0.1)."""
    bank, queries = (F.normalize(images.encode_split(split, model), dim=1)
                     for split in (images.train, images.test))
    bank_labels, labels = (split.labels.to(bank.device) for split in (images.train, images.test))
    cosine, at = similarity_topk(queries, bank, neighbours(images), impl=impl)
    votes = torch.zeros(len(queries), int(bank_labels.max()) + 1, device=bank.device)
    votes.scatter_add_(1, bank_labels[at], (cosine / 0.1).exp())
    return 100 * (votes.argmax(1) == labels).float().mean().item()


def evaluate_model(args, script, crops, linear_probe):
    """Run --evaluate: print the accuracy of --model by kNN and by a linear probe."""
    if args.model in encoders.RESNETS:
        fail(f"--model {args.model}: a new model has learnt nothing; give a folder or a hub name")
    images = ImageDataset(args, crops) if args.data else None
    if not images or not images.test:
        fail("--evaluate: expected labelled training images in --data, and test images in --data or --dev")
    log("data", images.describe())
    run = Run(args, script)
    encoder = load_image_encoder(args.model)
    model = ImageEncoder(encoder, None, run, *encoders.read_mean_std(args.model)).to(run.device)
    images.to_device(run)
    scores = {f"kNN (k = {neighbours(images)})": evaluate_knn(model, images, run.impl)}
    if args.probe_epochs:
        scores["linear"] = linear_probe(model, images, run)
    shown = ", ".join(f"{name} {score:.2f} %" for name, score in scores.items())
    log("test", f"{shown}  {args.model}")


def train_probe(model, images, run, *, batch, lr_schedule, init_std=0.0, nesterov=False, weight_decay=0.0):
    """Train a linear layer on the frozen features, and return its test accuracy in percent. Training uses
    random crops of at least 0.08 of an image's area; --crop has no effect on them. Testing uses centre crops.

    batch           number of images in a batch
    lr_schedule     function: (step from 0, number of steps) → learning rate
    init_std        standard deviation of the layer's initial weights; 0: all weights start at zero
    """
    model.eval()
    torch.manual_seed(run.args.seed)                           # --evaluate must train the same probe
    train_labels, labels = (split.labels.to(run.device) for split in (images.train, images.test))
    layer = nn.Linear(model.feature_dim, len(images.classes), device=run.device)
    nn.init.normal_(layer.weight, std=init_std) if init_std else nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9, nesterov=nesterov,
                                weight_decay=weight_decay)
    epoch = len(images) // batch
    total, crops = run.args.probe_epochs * epoch, images.crops._replace(min_area=0.08)

    def order():
        return zip(range(total), batches(len(images), batch, run.args.seed, min_rows=batch))

    views = images.views(images.train, ((step // epoch, rows) for step, rows in order()), crops)
    for (step, rows), x in progress(zip(order(), views), "linear probe", " steps", total=total):
        set_lr(optimizer, lr_schedule(step, total))
        with torch.no_grad():
            h = model.features(x)
        optimizer.zero_grad()
        F.cross_entropy(layer(h), train_labels[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        correct = layer(images.encode_split(images.test, model)).argmax(1) == labels
    return 100 * correct.float().mean().item()
