"""Pictures to train on and to be judged by: their labels and their views."""
import numpy as np
import torch
import torch.distributed as dist

from kernels import gather_rows, own_rows

from ..cli import afford, fail
from ..loop import batches, epoch_steps
from ..progress import progress
from . import encoders as nets
from .augmentation import flip, middle
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
