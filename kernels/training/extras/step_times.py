"""What share of a training step its loss takes: simclr.py --profile."""
from kernels import choose_impl
from kernels.benchmark.measure import memory, seconds

from ..cli import say
from ..loop import batches

REPEAT = 10                                                    # timed steps, after three that are not


def profile(model, optimizer, pictures, run, make_batch, compute_loss):
    """Says the milliseconds of a step, and of its loss alone, forward and backward: medians.

    make_batch, compute_loss    the script's; a batch's first part is what the model reads
    """
    args, rows = run.args, run.args.batch_size
    pictures.start(run, 1, args.crop)
    batch = make_batch(next(batches(len(pictures), rows, args.seed)), pictures, args)
    model.train()

    def step():
        optimizer.zero_grad()
        compute_loss(model, batch, rows, args)[0].backward()
        optimizer.step()

    def loss_alone():
        compute_loss(lambda _: embeddings, batch, rows, args)[0].backward()

    device = run.device.type
    for _ in range(2):                                         # `seconds` makes the third
        step()
    whole, peak = seconds(step, device, REPEAT)[0], memory(device) / 2**30
    embeddings = model(batch[0]).detach().requires_grad_()
    alone = seconds(loss_alone, device, REPEAT)[0]
    impl = choose_impl(args.impl, embeddings)
    say("profile", f"{rows} pictures, {device}, {args.precision}, kernels {impl}: step {whole:.1f} ms, "
                   f"loss {alone:.2f} ms, {100 * alone / whole:.1f} % of it; peak {peak:.2f} GB; "
                   "views not counted")
