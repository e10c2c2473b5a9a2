"""A table of vectors that AdamW trains, of which each step touches only the rows that its batch uses."""
import torch

LONGEST_WAIT = 160                                             # float32 sees no later momentum: 0.9¹⁶⁰ = 5e-8


class LazyEmbedding(torch.nn.Module):
    """An embedding with AdamW (β 0.9 and 0.999, ε 1e-8, no weight decay) built in.

    AdamW also moves a row in steps without a gradient, by what is left of its momentum. Here such a row
    waits, and makes these moves up before its next use: up to rounding, the vectors are those of
    torch.optim.AdamW. Call schedule() before the first step, and step() after each backward pass.

    vectors   (rows, D) float32, where training starts
    slots     the most different rows of a batch
    """

    def __init__(self, vectors, slots):
        super().__init__()
        self.register_buffer("vectors", vectors)
        self.register_buffer("m", torch.zeros_like(vectors))
        self.register_buffer("v", torch.zeros_like(vectors))
        last = torch.zeros(len(vectors), dtype=torch.int64) # the step of a row's last gradient; 0: none
        self.register_buffer("last", last)
        # The batch's rows, written by forward: all that backward, sum_gradients and clip_grad_norm_ see.
        self.used = torch.nn.Parameter(vectors.new_zeros(slots, vectors.shape[1]))

    def schedule(self, rates, done):
        """Set the learning rate of each step, and how many steps are done."""
        steps = torch.arange(1, len(rates) + 1, dtype=torch.float64)
        rates, scales = torch.tensor(rates, dtype=torch.float64), (1 - 0.999 ** steps).rsqrt()
        rates = rates / (1 - 0.9 ** steps)
        self.rates, self.scales, self.done = rates.to(self.vectors), scales.to(self.vectors), done

    @torch.no_grad()
    def catch_up(self, rows):
        """(vectors, m, v) of the rows after all steps that are done."""
        vectors, m, v, last = (x[rows] for x in (self.vectors, self.m, self.v, self.last))
        waited, root = torch.where(last > 0, self.done - last, -1), v.sqrt()
        for k in range(min(int(waited.max()) + 1, LONGEST_WAIT)):              # 0: the step with the gradient
            at = (last + k - 1).clamp(0, self.done - 1)
            rate = torch.where(k <= waited, self.rates[at] * 0.9 ** k, 0)
            vectors -= rate[:, None] * m / (root * (self.scales[at] * 0.999 ** (k / 2))[:, None] + 1e-8)
        waited = waited.clamp(min=0)[:, None]
        return vectors, m * 0.9 ** waited, v * 0.999 ** waited

    def forward(self, ids):
        """(..., D) vectors of the row numbers ids (...)."""
        rows, places = ids.unique(return_inverse=True)
        self.batch = rows, *self.catch_up(rows)
        with torch.no_grad():
            self.used[: len(rows)] = self.batch[1]
        return self.used[places]

    @torch.no_grad()
    def step(self):
        """Take the gradient of the last batch's rows into m and v; catch_up moves the rows by it later."""
        rows, vectors, m, v = self.batch
        gradient, self.done = self.used.grad[: len(rows)], self.done + 1
        self.vectors[rows] = vectors
        self.m[rows], self.v[rows] = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient ** 2
        self.last[rows], self.used.grad = self.done, None
