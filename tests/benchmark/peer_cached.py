"""Compare simcse.py in several processes with sentence-transformers: time per step, memory, and the weights.

    torchrun --nproc-per-node 2 tests/benchmark/peer_cached.py ours MODEL triples.csv --out out/ours
    torchrun --nproc-per-node 2 tests/benchmark/peer_cached.py peer MODEL triples.csv --out out/peer
    python tests/benchmark/peer_cached.py compare MODEL triples.csv --out out/ours out/peer

`ours` runs simcse.py. `peer` runs CachedMultipleNegativesRankingLoss with gather_across_devices=True in its own
trainer, and needs pip install sentence-transformers accelerate datasets. Both train on the same rows in the same
order, with mean pooling, AdamW without weight decay, and linear decay to 0. They print the median time of a
step after the first, and the peak memory of each process. `compare` prints the relative norm of the difference
of the weights' changes; give both runs --dropout 0 before. MODEL is a folder, triples.csv has a header.
"""
import argparse
import csv
import itertools
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ours", "peer", "compare"))
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    parser.add_argument("--batch-size", type=int, default=512, help="rows per step, over all processes")
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=13, help="at most 39")
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()
    if args.side == "compare":
        print(f"relative difference of the weights' changes: {compare(args.model, *args.out):.1e}")
        return
    ends = {"ours": train_ours, "peer": train_peer}[args.side](args)
    step = statistics.median(end - start for start, end in itertools.pairwise(ends))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024       # Linux: in KB
    print(f"{args.side}, rank {os.environ['RANK']}: {step:.2f} s per step, peak {peak:,.0f} MB")


def train_ours(args):
    """Run simcse.py; return the seconds at the end of each step."""
    import simcse

    flags = ["--data", args.data, "--model", args.model, "--pooling", "avg", "--batch-size", args.batch_size,
             "--chunk-size", args.chunk_size, "--steps", args.steps, "--dropout", args.dropout,
             "--precision", "fp32", "--out", args.out[0]]
    simcse.main([*map(str, flags)])
    return [json.loads(row)["seconds"] for row in open(args.out[0] / "metrics.jsonl")]


def train_peer(args):
    """Run the trainer of sentence-transformers on simcse.py's batches; return the seconds at each step's end."""
    try:
        import sentence_transformers as peer
        from datasets import Dataset
        from sentence_transformers.base.sampler import DefaultBatchSampler
        from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
    except ImportError as error:
        sys.exit(f"{error}: pip install sentence-transformers accelerate datasets")
    import torch
    from transformers import TrainerCallback

    from kernels.training.loop import batches

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    def in_order(rows, **settings):
        return DefaultBatchSampler(torch.utils.data.SequentialSampler(rows), **settings)

    ends, world = [], int(os.environ["WORLD_SIZE"])
    _, *rows = csv.reader(open(args.data, newline="", encoding="utf-8"))
    order = itertools.islice(batches(len(rows), args.batch_size, 42), args.steps)  # 42: simcse.py's seed
    data = Dataset.from_list([dict(zip("apn", rows[i])) for batch in order for i in batch])
    dropout = dict(dropout=args.dropout, attention_dropout=args.dropout)       # DistilBERT's names
    model = peer.SentenceTransformer(str(args.model), device="cpu", config_kwargs=dropout)   # mean pooling
    model.max_seq_length = 32
    settings = peer.SentenceTransformerTrainingArguments(
        str(args.out[0] / "trainer"), per_device_train_batch_size=args.batch_size // world, num_train_epochs=1,
        learning_rate=5e-5, use_cpu=True, ddp_backend="gloo", batch_sampler=in_order, report_to="none",
        save_strategy="no", disable_tqdm=True)
    loss = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=args.chunk_size,
                                              gather_across_devices=True)
    peer.SentenceTransformerTrainer(model, settings, train_dataset=data, loss=loss, callbacks=[Clock()]).train()
    if os.environ["RANK"] == "0":
        model[0].auto_model.save_pretrained(args.out[0])
    return ends


def compare(start, ours, peer):
    """Return |Δ of ours − Δ of the peer| / |Δ of the peer|, Δ the change of all weights since `start`."""
    import torch
    from safetensors.torch import load_file

    start, ours, peer = (load_file(folder / "model.safetensors") for folder in (start, ours, peer))
    a, b = (torch.cat([(x[name] - start[name]).double().flatten() for name in start]) for x in (ours, peer))
    return (a - b).norm() / b.norm()


if __name__ == "__main__":
    main()
