"""How good an encoder is: nearest neighbours, a linear layer on its features, its classifier."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from kernels import similarity_topk

from ..cli import fail, say
from ..loop import batches, set_lr
from ..progress import progress
from ..run import Run
from . import encoders as nets
from .dataset import Pictures
from .encoders import PictureEncoder, load_image_encoder


def before(model, pictures, run):
    """The score before the first step; how long it takes tells how long the linear probe will."""
    if pictures.test and not model.classes:
        if run.step == 0:
            share = len(pictures.train) / (len(pictures.train) + len(pictures.test))
            with run.clock.apart(again=share * run.args.probe_epochs, evaluation=True):
                run.note_before(evaluate(model, pictures, run.impl))
        say("before", f"kNN {run.progress['before']['knn']:.2f} %")


def judge(model, pictures, run):
    """Evaluates and saves the model: the last one is kept, nothing is chosen on test pictures."""
    average_statistics(model)
    scores = evaluate(model, pictures, run.impl) if pictures.test else {}
    if run.keeps(scores, shown="".join(f"{score:.2f}" for score in scores.values())):
        nets.save(model, run, pictures.size)


def after(model, pictures, run, linear_probe):
    """Reads the checkpoint, trains a linear layer on its features, and says how to load it."""
    model.restore(run.out)
    rise, best = "", run.progress["saved"]
    if pictures.test and model.classes:
        rise = f"top-1 {best['top1']:.2f} %, "
    elif pictures.test:
        rise = f"kNN {run.progress['before']['knn']:.2f} → {best['knn']:.2f} %, "
        if run.args.probe_epochs:
            rise += f"linear {linear_probe(model, pictures, run):.2f} %, "
    run.done(rise)
    say("load", nets.load_line(model, run))


def average_statistics(model):
    """The mean over ranks of what batch norms have seen, so that all save and evaluate the same model."""
    for name, statistic in model.named_buffers():
        if "running" in name and dist.is_initialized():
            dist.all_reduce(statistic)
            statistic /= dist.get_world_size()


def knn_accuracy(bank, bank_labels, queries, labels, k=200, temperature=0.1, impl="auto"):
    """Percent of queries whose label the k nearest rows of the bank give; each votes with exp(cosine / τ)."""
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    cosine, at = similarity_topk(queries, bank, min(k, len(bank)), impl=impl)
    votes = torch.zeros(len(queries), int(bank_labels.max()) + 1, device=bank.device)
    votes.scatter_add_(1, bank_labels[at], (cosine / temperature).exp())
    return 100 * (votes.argmax(1) == labels).float().mean().item()


def evaluate(model, pictures, impl="auto"):
    """{"knn": percent} of test pictures by the training pictures; {"top1": percent} of a classifier."""
    if model.classes:
        return {"top1": accuracy(model, pictures)}
    bank, queries = pictures.encode_side(pictures.train, model), pictures.encode_side(pictures.test, model)
    labels, wanted = (side.labels.to(bank.device) for side in (pictures.train, pictures.test))
    return {"knn": knn_accuracy(bank, labels, queries, wanted, impl=impl)}


def accuracy(model, pictures):
    """Percent of the test pictures that a classifier labels right; a class is known by its name."""
    numbers = {name: i for i, name in enumerate(model.classes)}
    wanted = torch.tensor([numbers.get(name, -1) for name in pictures.classes])[pictures.test.labels]
    right = pictures.encode_side(pictures.test, model, logits=True).argmax(1).cpu() == wanted
    return 100 * right.float().mean().item()


def score(args, script, crops, linear_probe):
    """--evaluate of picture encoders: kNN and linear probe of --model on --data, and its classifier, which
    needs no --data."""
    if not args.data and nets.load_head(args.model)[1] is None:
        fail(f"--evaluate: --model {args.model} has no classifier: kNN and the linear probe also need "
             "labelled training pictures, by --data")
    if args.model in nets.RESNETS:
        fail(f"--model {args.model}: a new model has learnt nothing; name a folder or one of the hub")
    pictures = Pictures(args, crops)
    say("data", pictures.describe())
    if not pictures.test:
        fail("--evaluate: wanted labels on both sides, and a test set: in --data, or by --dev")
    run = Run(args, script)
    encoder, (head, classes) = load_image_encoder(args.model, pictures.small), nets.load_head(args.model)
    model = PictureEncoder(encoder, head, run, *nets.read_statistics(args.model)).to(run.device)
    pictures.join(run)
    found = []
    if args.data:
        found.append(f"kNN {evaluate(model, pictures, run.impl)['knn']:.2f} %")
    if args.data and args.probe_epochs:
        found.append(f"linear {linear_probe(model, pictures, run):.2f} %")
    if classes:
        model.classes = classes
        found.append(f"classifier {accuracy(model, pictures):.2f} %")
    say("test", f"{', '.join(found)}  {args.model}")


def train_probe(model, pictures, run, *, batch, rate, std=0.0, nesterov=False, decay=0.0):
    """Percent of test pictures that a linear layer on the frozen features labels right: trained on crops of
    at least 0.08 of a picture, whatever --crop is, and judged in the middle of pictures.

    rate    (step from 0, steps) → learning rate
    std     of the layer's first weights
    decay   of its weights
    """
    model.eval()
    torch.manual_seed(run.args.seed)                           # the same after training and by --evaluate
    labels, wanted = (side.labels.to(run.device) for side in (pictures.train, pictures.test))
    layer = nn.Linear(model.width, len(pictures.classes), device=run.device)
    nn.init.normal_(layer.weight, std=std) if std else nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9, nesterov=nesterov,
                                weight_decay=decay)
    epoch = len(pictures) // batch
    total, crops = run.args.probe_epochs * epoch, pictures.crops._replace(least=0.08)
    order = lambda: zip(range(total), batches(len(pictures), batch, run.args.seed, least=batch))
    views = pictures.views(pictures.train, ((step // epoch, rows) for step, rows in order()), crops)
    for (step, rows), x in progress(zip(order(), views), "linear probe", " steps", total=total):
        set_lr(optimizer, rate(step, total))
        with torch.no_grad():
            h = model.features(x)
        optimizer.zero_grad()
        F.cross_entropy(layer(h), labels[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        right = layer(pictures.encode_side(pictures.test, model)).argmax(1) == wanted
    return 100 * right.float().mean().item()
