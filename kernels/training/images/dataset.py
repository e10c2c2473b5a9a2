"""Pictures to train on and to be judged by: their views, and what neighbours or a linear layer tell of an
encoder."""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from kernels import gather_rows, own_rows, similarity_topk

from ..cli import afford, fail, say
from ..loop import batches, epoch_steps, set_lr
from ..progress import progress
from ..run import Run
from . import encoders as nets
from .augmentation import flip, middle
from .encoders import PictureEncoder, load_image_encoder
from .formats import read_pictures


class Pictures:
    """The pictures of --data, and those that a model is judged by: of --dev, or a test set in --data.

    train, test   Arrays or Files; test is None where either side has no labels. Both are the pictures of
                  --dev if there is no --data, which a classifier does without
    crops         views.Crops: how a script draws views
    size, small   of a view's sides, in pixels; whether it is at most 32: the papers have other settings there
    classes       names of the labels, in the order of their numbers
    """

    def __init__(self, args, crops):
        self.path, self.crops, self.seed = args.data or args.dev, crops, args.seed
        self.train, test = read_pictures(self.path, args.workers, args.skip_damaged)
        if args.dev:
            test = self.train
        if args.dev and args.data:
            test, _ = read_pictures(args.dev, args.workers, args.skip_damaged)
        self.size = args.size or self.train.usual_size(nets.read_size(args.model))
        self.small = self.size <= nets.SMALL
        afford(f"--size {self.size}: {args.batch_size} pictures", 12 * args.batch_size * self.size**2)
        labelled = test and self.train.labels is not None and test.labels is not None
        self.test = test if labelled else None
        self.number_classes()
        if not args.evaluate:
            self.enough(args.batch_size)

    def __len__(self):
        return len(self.train)

    def number_classes(self):
        """Labels become numbers from 0 on without a gap, of one name on both sides the same: each has a
        column where pictures vote, and a row of weights."""
        numbers = {}
        sides = [self.train] if self.test is self.train else [self.train, self.test]
        for side in sides:
            if side and side.labels is not None:
                found, at = side.labels.unique(return_inverse=True)
                named = [side.names.get(label, str(label)) for label in found.tolist()]
                side.labels = torch.tensor([numbers.setdefault(name, len(numbers)) for name in named])[at]
        self.classes = [*numbers]
        if self.test:
            afford(f"{self.path}: {len(numbers):,} labels for {len(self.test):,} test pictures",
                   4 * len(numbers) * len(self.test))

    def keep_share(self, share):
        """Leaves a share of the pictures of each class, drawn by the seed, and at least one of each."""
        generator, labels = torch.Generator().manual_seed(self.seed), self.train.labels
        kept = []
        for rows in ((labels == label).nonzero()[:, 0] for label in labels.unique()):
            drawn = torch.randperm(len(rows), generator=generator)
            kept.append(rows[drawn[: max(1, round(share * len(rows)))]])
        self.train.keep(torch.cat(kept).sort().values.numpy())

    def enough(self, batch):
        if batch > len(self):
            fail(f"{self.path}: {len(self):,} pictures, wanted at least --batch-size, which is {batch}")

    def describe(self):
        """600 pictures from shapes.npz, views of 16 px, 6 classes, 300 test pictures"""
        judged = "no labelled test set: no evaluation"
        if self.test:
            judged = f"{len(self.classes):,} classes, {len(self.test):,} test pictures"
        return f"{len(self):,} pictures from {self.path}, views of {self.size} px, {judged}"

    def join(self, run):
        """Goes to the device of a run, which is told the checksums of files that were read whole."""
        self.device = run.device
        run.known |= dict(data=self.train.digest, finetune=self.train.digest,
                          dev=self.test and self.test.digest)
        for side in (self.train, self.test):
            if side:
                side.place(run.device)

    def views(self, side, order, crops=None, count=1):
        """Yields (count · n, 3, S, S) float32 from 0 to 1, on the device, of each (epoch, n row numbers) of
        an order: so many random crops of each picture, half of them in a mirror, all first ones before all
        second; without crops its middle."""
        seed, share = self.seed, 1 if self.small else nets.CENTRE      # with self feed would be in a cycle

        def plan():
            for epoch, rows in order:
                rows = np.asarray(rows)
                sizes = side.sizes(rows)
                yield rows, crops.draw(seed, epoch, rows, sizes, count) if crops else middle(sizes, share)

        views = side.load_views(plan(), self.size, self.crops.cubic, self.device)
        return map(flip, views) if crops else views

    def start(self, run, total, least, count=2):
        """Begins the views of training, as `feed`: of this rank's pictures of each step that is left."""
        batch = run.args.batch_size
        epoch = epoch_steps(len(self), batch, batch)
        order = zip(range(run.step, total), batches(len(self), batch, self.seed, run.step, batch))
        own = ((step // epoch, rows[own_rows(len(rows))]) for step, rows in order)
        self.feed = self.views(self.train, own, self.crops._replace(least=least), count)

    def encode_side(self, side, model, logits=False):
        """(N, H) features, or logits, of all pictures of a side: each rank reads its share, or, where there
        are fewer pictures than ranks, all."""
        shared = len(side) >= (dist.get_world_size() if dist.is_initialized() else 1)
        own = range(len(side))[own_rows(len(side)) if shared else slice(None)]
        starts = progress(range(0, len(own), 256), "evaluating", " batches")
        order = ((0, own[i : i + 256]) for i in starts)
        found = model.encode_batches(self.views(side, order), logits)
        return gather_rows(found, len(side)) if shared else found

    def before(self, model, run):
        """The score before the first step; how long it takes tells how long the linear probe will."""
        if self.test and not model.classes:
            if run.step == 0:
                share = len(self.train) / (len(self.train) + len(self.test))
                with run.clock.apart(again=share * run.args.probe_epochs, evaluation=True):
                    run.note_before(evaluate(model, self, run.impl))
            say("before", f"kNN {run.progress['before']['knn']:.2f} %")

    def judge(self, model, run):
        """Evaluates and saves the model: the last one is kept, nothing is chosen on test pictures."""
        average_statistics(model)
        scores = evaluate(model, self, run.impl) if self.test else {}
        if run.keeps(scores, shown="".join(f"{score:.2f}" for score in scores.values())):
            nets.save(model, run, self.size)

    def after(self, model, run, linear_probe):
        """Reads the checkpoint, trains a linear layer on its features, and says how to load it."""
        model.restore(run.out)
        rise, best = "", run.progress["saved"]
        if self.test and model.classes:
            rise = f"top-1 {best['top1']:.2f} %, "
        elif self.test:
            rise = f"kNN {run.progress['before']['knn']:.2f} → {best['knn']:.2f} %, "
            if run.args.probe_epochs:
                rise += f"linear {linear_probe(model, self, run):.2f} %, "
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
