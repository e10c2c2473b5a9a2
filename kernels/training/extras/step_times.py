"""simclr.py --profile: time a training step, and the loss alone."""
from kernels import choose_impl
from kernels.benchmark import peak_memory_bytes, time_ms

from ..cli import log
from ..loop import batches

REPEAT = 10                                                    # timed steps, after three untimed ones


def profile(model, optimizer, images, run, make_batch, compute_loss):
    """Print the median time of a training step, and of the forward and backward pass of the loss alone.

    make_batch, compute_loss    functions of the script; the first item of a batch is the model's input
    """
    args, rows = run.args, run.args.batch_size
    images.start_training_views(run, 1, args.crop)
    batch = make_batch(next(batches(len(images), rows, args.seed)), images, args)
    model.train()

    def step():
        optimizer.zero_grad()
        compute_loss(model, batch, rows, args)[0].backward()
        optimizer.step()

    def loss_alone():
        compute_loss(lambda _: embeddings, batch, rows, args)[0].backward()

    device = run.device.type
    for _ in range(2):                                         # time_ms makes the third untimed step
        step()
    step_ms = time_ms(step, device, REPEAT)[0]
    peak = peak_memory_bytes(device) / 2**30
    embeddings = model(batch[0]).detach().requires_grad_()
    loss_ms = time_ms(loss_alone, device, REPEAT)[0]
    impl = choose_impl(args.impl, embeddings)
    log("profile", f"{rows} images, {device}, {args.precision}, kernels {impl}: step {step_ms:.1f} ms, "
                   f"loss {loss_ms:.2f} ms, {100 * loss_ms / step_ms:.1f} % of the step; peak memory "
                   f"{peak:.2f} GB; making the views is not included")
