"""What share of a training step its loss takes."""
from kernels import choose_impl

from .measure import memory, seconds


def describe_step(model, optimizer, compute_loss, batch, rows, args, repeat=10):
    """A text of the milliseconds of a step and of its loss alone, forward and backward: medians, after three
    steps that are not timed. compute_loss is a script's, of a batch whose first part is what the model reads.
    """
    def step():
        optimizer.zero_grad()
        compute_loss(model, batch, rows, args)[0].backward()
        optimizer.step()

    def loss_alone():
        compute_loss(lambda _: embeddings, batch, rows, args)[0].backward()

    device = batch[0].device.type
    for _ in range(2):                                         # seconds makes the third
        step()
    whole, peak = seconds(step, device, repeat)[0], memory(device) / 2**30
    embeddings = model(batch[0]).detach().requires_grad_()
    alone = seconds(loss_alone, device, repeat)[0]
    return (f"kernels {choose_impl(args.impl, embeddings)}: step {whole:.1f} ms, loss {alone:.2f} ms, "
            f"{100 * alone / whole:.1f} % of it; peak {peak:.2f} GB")
