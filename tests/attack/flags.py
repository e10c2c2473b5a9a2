"""Flags with bad values or values too large for any machine: every flag alone, and flags in combination."""
import importlib
import itertools
from functools import partial

from cases import SCRIPTS, Case

case = partial(Case, "flags")

NUMBERS = ["x", "nan", "inf", "-1", "0", "1e30", "1" + "0" * 12, str(2**63), "", "9" * 5000, "0x10",
           "1_0",
           "٣", "1e400", "-0.0", "1e-320", "1.5"]
NAMES = ["none/such", "", "a\nb", "\udcff", "b" * 5000, "-", "~", "/dev/null", "/proc/self/mem"]
CHOICES = ["x", "", "CLS", "a\nb", "\x1b[2J", "b" * 5000, "\udcff", "paper,code"]
# {flag: more flags that the command needs, because without them the script ignores this flag}
NEEDED_FLAGS = {"--layer-study": "--dev sts.tsv", "--contrast-set": "topics.tsv",
                "--ood": "--dev topics.tsv"}
COMBINATIONS = {
    "simcse": """--evaluate --resume, --head keep new, --head keep train-only, --columns 1 1 1, --columns 9,
        --prompt a b c d, --pooling last --head keep, --resume --out none, --batch-size 1, --batch-size 25,
        --chunk-size 1 --mlm-weight 1, --chunk-tokens 1 --mlm-weight 1,
        --da few.csv, --test --dev, -1, --, few.csv, --no-such 1, --lr=--lr, --lr,
        --lr 1e18 --steps 3, --evaluate --model scratch --dev sts.tsv, --temperature 1e-4 --lr 1,
        --resume=x, --views blur, --views dropout, --views spans, --columns 1 --views spans,
        --columns 1 --views spans --spans 99999999999 1, --spans 1, --spans 0 1,
        --views crop delete shuffle, --columns 1 --views crop delete --view-rates 0.99 0,
        --view-rates 0.5 0.5 0.5 --views token_cutoff feature_cutoff embedding_dropout,
        --view-rates nan 0 0, --columns 1 --views token_cutoff embedding_dropout --view-rates 0.999 0.999,
        --wordnet few.csv, --columns 1 --views synonym dropout --wordnet bert, --adversarial 1e18 --steps 3,
        --adversarial 0.1, --columns 1 --adversarial 1, --objective ranking,
        --objective ranking --columns 1 2, --objective ranking --margin 1e18 --lr 1e18 --steps 3,
        --objective nt-xent, --objective x, --log x, --log wandb, --log tensorboard,
        --keep-state never --resume, --objective nt-xent --columns 1 2 --batch-size 1, --recipe nope,
        --recipe consert --steps 1, --recipe declutr --columns 1,
        --objective nt-xent --ignore-equal --columns 1 2, --recipe simcls --columns 1 2,
        --optimizer-recipe x, --optimizer-recipe declutr --lr 1e18 --steps 3,
        --optimizer-recipe simcls --lr 1e18 --steps 3, --candidate-length 8,
        --optimizer-recipe consert --steps 1,
        --columns 1 --views feature_cutoff shuffle --adversarial 1e18 --optimizer-recipe consert --steps 3""",
    "simclr": """--dev few.txt, --crop 2, --projection-dim 100000000000, --profile --resume,
        --batch-size 24 --chunk-size 1, --batch-size 1 --head-layers 3, --evaluate --model resnet-18,
        --image-size 0, --image-size 100000, --image-size 1, --workers -1, --workers 0, --skip-damaged,
        --recipe nope, --recipe cifar --supervised,
        --recipe v2 --image-size 8 --model resnet-small --batch-size 8, --supervised,
        --supervised --no-normalize, --supervised --finetune few.npz, --finetune few.npz --distill net,
        --finetune none --data few.npz, --finetune few.npz --label-fraction 0,
        --label-fraction 0 --finetune few.npz, --label-fraction 2, --label-fraction nan,
        --finetune few.npz --model net --label-fraction 1e-9, --from-layer 9,
        --finetune few.npz --model net --from-layer 9, --finetune few.npz --model net --from-layer 2,
        --finetune few.npz --from-layer 0, --distill none, --distill net, --distill bert, --distill few.npz,
        --head-layers 0, --head-layers 0 --projection-dim 1, --head-layers 0 --form code,
        --no-head-norm --form code, --profile --finetune few.npz --model net,
        --lr-scaling sqrt --lr 1e18 --steps 3, --no-normalize""",
    "moco": """--queue-size 7, --bn-splits 3, --bn-splits 8, --v1 --symmetric,
        --queue-size 8 --projection-dim 100000000000, --queue-size 800000000000, --momentum 2,
        --batch-size 3 --bn-splits 2, --evaluate --model net, --image-size 0, --image-size 100000,
        --image-size 9, --workers -1, --workers 0, --skip-damaged, --recipe nope,
        --recipe demo --batch-size 8 --steps 1 --queue-size 16 --model resnet-small,
        --recipe v1 --image-size 8, --memory-bank --symmetric, --memory-bank --queue-size 1,
        --memory-bank --momentum 0 --lr 1e18 --steps 3, --memory-bank --projection-dim 100000000000,
        --memory-bank --recipe v2 --image-size 8""",
    "selfguided": """--layers 99, --layers 0 0, --objective base --layers 2, --layer-study --evaluate,
        --projection-dim 100000000000, --projection-dim 1 --chunk-size 1""",
    "cline": """--held-out-rows 999, --synonym-rate 0 --antonym-rate 0, --tagger none,
        --save-triples few.csv, --save-triples /dev/full, --synonym-rate 1 --antonym-rate 1,
        --evaluate --model bert""",
    "tacl": """--grad-accum 9, --teacher net, --shuffle-buffer 2 --dev-pairs 1,
        --similarity dot --form code, --max-length 4, --contrastive-weight 0 --teacher bert,
        --evaluate --model bert""",
    "ease": """--hard-negatives 99, --entity-map none --entity-vectors few.txt, --negative-group-size 1,
        --equal-entities mask --form code, --entity-weight 0 --simcse-weight 0, --hard-negative-weight 1e12,
        --warmup-steps 500""",
    "vascl": """--radius 1 --relative-radius 1, --neighbours 99, --neighbours 100000000000,
        --ascent-steps 0, --form paper --chunk-size 1, --head-lr 1e18 --lr 1e18 --steps 3, --radius 1e18""",
    "dclr": """--guide scratch, --guide net, --phi -1, --noise-per-sentence 0 --noise-steps 0,
        --noise-per-sentence 1e9, --noise-step-size 1e18, --phi 9""",
    "childtuning": """--mode none none, --reserve-p 1 --mode D, --reserve-p 1e-30, --num-seeds 2,
        --metric pearson, --task regression, --child-filter none --mode D, --rdrop-weight 1 --form code,
        --text-columns sentence sentence, --label-column none, --evaluate --model bert --dev topics.tsv,
        --fisher-samples 100000000000 --mode D, --lr 1e18 --steps 3, --supcon-weight 2,
        --supcon-weight 1 --rdrop-weight 1, --supcon-weight 1e-30, --supcon-weight 1 --temperature 1e-4,
        --supcon-weight 1 --task regression, --ood-epochs 1 --task regression,
        --ood-epochs 1 --supcon-weight 0.5, --ood-epochs 1 --adversarial 1e18,
        --ood-epochs 1 --adversarial 0 --temperature 1e-4 --form code, --ood topics.tsv,
        --ood none --dev topics.tsv, --ood few.txt --dev topics.tsv --num-seeds 2,
        --ood few.csv --dev topics.tsv, --ood documents.txt --dev topics.tsv --evaluate --model bert,
        --ood few.txt --dev topics.tsv --lr 1e18 --steps 3"""}


def cases():
    numbers, names, choices = map(itertools.cycle, (NUMBERS, NAMES, CHOICES))
    flags = {}
    for script in SCRIPTS:
        for flag in importlib.import_module(script).make_parser()._actions:
            if flag.nargs != 0:
                flags.setdefault(flag.option_strings[-1], (flag, []))[1].append(script)
    for (name, (flag, scripts)), turn in zip(flags.items(), itertools.count()):
        value = next(numbers if flag.type else choices if flag.choices else names)
        short = value if len(value) < 30 else f"{value[0]} {len(value):,} times"
        argv = [name, value, *NEEDED_FLAGS.get(name, "").split()]
        yield case(f"{name} {short!a}", scripts[turn % len(scripts)], argv)
    for script, lines in COMBINATIONS.items():
        for line in lines.split(","):
            yield case(" ".join(line.split()), script, line.split(), may_leave_out="1e" in line)
