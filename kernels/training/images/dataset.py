"""The images of a run: a training and a test split with their labels, and iterators over their views."""
import numpy as np
import torch

from kernels import gather_rows, own_rows

from ..errors import fail
from ..flags import check_batch_size
from ..loop import batches, steps_per_epoch
from ..progress import progress
from . import encoders
from .augmentation import flip
from .formats import read_images
from .loading import Cutter


class ImageDataset:
    """The training images of --data, and the test images of --dev or of a test set in --data.

    args             the script's flags
    crops            augmentation.Crops: how the script samples training crops
    train, test      ImageSource of each split. test is None if there is no test split, or if one of the two
                     splits has no labels
    size             side of a view in pixels
    is_small         whether size <= 32. If so, the encoder's first layers and some flag defaults differ
    classes          class names; a label is an index into this list
    training_views   iterator over this rank's training views; start_training_views sets it
    """

    def __init__(self, args, crops):
        self.path, self.crops, self.seed = args.data, crops, args.seed
        self.train, test = read_images(self.path, args.workers, args.skip_damaged)
        if args.dev:
            test, _ = read_images(args.dev, args.workers, args.skip_damaged)
        self.size = args.image_size or self.train.default_view_size(encoders.read_size(args.model))
        self.is_small = self.size <= encoders.SMALL_SIZE
        labelled = test and self.train.labels is not None and test.labels is not None
        if args.dev and not labelled:
            missing = args.dev if self.train.labels is not None else self.path
            fail(f"--dev {args.dev}: {missing} has no labels; evaluation needs labels in --dev and --data")
        self.test = test if labelled else None
        self.renumber_labels(args.dev or self.path)
        if not args.evaluate:
            check_batch_size(len(self), self.path, args.batch_size, "images", least=1)

    def __len__(self):
        return len(self.train)

    def renumber_labels(self, test_path):
        """Renumber the labels of both splits to 0, 1, 2, ... without gaps, because a label is used as index
        of a logit and of a kNN vote. A class has the same number in both splits. Fail if no class of the test
        images is in the training data."""
        numbers = {}
        for split in (self.train, self.test):
            if split and split.labels is not None:
                found, at = split.labels.unique(return_inverse=True)
                names = [split.names.get(label, str(label)) for label in found.tolist()]
                if split is self.test and numbers.keys().isdisjoint(names):
                    fail(f"{test_path}: found the classes {', '.join(names)[:200]}, expected classes of "
                         f"{self.path}: {', '.join(numbers)[:200]}")
                split.labels = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])[at]
        self.classes = [*numbers]

    def describe(self):
        """Return text such as "600 images from shapes.npz, views of 16 px, 6 classes, 300 test images"."""
        evaluated = "no labelled test set: no evaluation"
        if self.test:
            evaluated = f"{len(self.classes):,} classes, {len(self.test):,} test images"
        return f"{len(self):,} images from {self.path}, views of {self.size} px, {evaluated}"

    def to_device(self, run):
        """Set the device of the views. Move images in memory to this device if there is room."""
        self.device = run.device
        for split in (self.train, self.test):
            if split:
                split.to_device(run.device)

    def views(self, split, order, crops=None, count=1):
        """Iterate over batches of views, (count · n, 3, S, S) float32 in [0, 1] on the device; S = self.size.

        split    self.train or self.test
        order    iterable of (epoch, n row numbers), one pair for each batch
        crops    Crops: make `count` random crops of each image, and flip each crop with probability 0.5. The
                 first crops of all images come before the second crops. None: the centre crop, not flipped
        """
        share = 1 if self.is_small else encoders.CENTRE_CROP
        cutter = Cutter(crops, self.seed, count, share, self.size, self.crops.bicubic)
        order = ((epoch, np.asarray(rows)) for epoch, rows in order)
        views = split.load_views(order, cutter, self.device)
        return map(flip, views) if crops else views

    def start_training_views(self, run, total, min_area, count=2):
        """Set training_views: `count` random crops of this rank's images for each remaining step of the run.

        total       number of steps of the whole run
        min_area    smallest area of a crop, as a share of the image's area; replaces self.crops.min_area
        """
        batch = run.args.batch_size
        epoch = steps_per_epoch(len(self), batch, batch)
        order = zip(range(run.step, total), batches(len(self), batch, self.seed, run.step, batch))
        local = ((step // epoch, rows[own_rows(len(rows))]) for step, rows in order)
        self.training_views = self.views(self.train, local, self.crops._replace(min_area=min_area), count)

    @torch.no_grad()
    def encode_split(self, split, model):
        """Return features (N, feature_dim) of the centre crops of a split's N images, in eval mode. Each rank
        encodes a part and receives all results."""
        local = range(len(split))[own_rows(len(split))]
        starts = progress(range(0, len(local), 256), "evaluating", " batches")
        order = ((0, local[i : i + 256]) for i in starts)
        training = model.training
        model.eval()
        features = [model.features(views) for views in self.views(split, order)]
        model.train(training)
        return gather_rows(torch.cat(features), len(split))
