"""The losses of kernels and of the papers, and Spearman's correlation, written out in plain PyTorch.

The functions have the names and arguments of the public functions, whose docstrings name the sources. A
projection head is given by its weights. (N, M) logits are stored, and inputs without gradient are detached.
"""
import torch
import torch.nn.functional as F


def unit(x, smallest=1e-12):
    return x / x.norm(dim=-1, keepdim=True).clamp(min=smallest)


def cosines(a, b):
    return unit(a, 1e-8) @ unit(b, 1e-8).mT


def cross_entropy(logits, positive):
    """Return the mean over all rows i of −log p, with p the softmax of row i at column positive[i]."""
    return (logits.logsumexp(1) - logits.gather(1, positive[:, None])[:, 0]).mean()


def info_nce(q, k, temperature, offset=0, symmetric=False, normalize=False):
    q, k = (unit(q), unit(k)) if normalize else (q, k)
    logits, own = q @ k.T / temperature, torch.arange(len(q)) + offset
    loss = cross_entropy(logits, own)
    return (loss + cross_entropy(logits.T, own)) / 2 if symmetric else loss


def clip_loss(image, text, temperature, normalize=False):
    return info_nce(image, text, temperature, symmetric=True, normalize=normalize)


def nt_xent(z1, z2, temperature, normalize=False):
    z, n = torch.cat([z1, z2]), len(z1)
    z = unit(z) if normalize else z
    logits = (z @ z.T / temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    return cross_entropy(logits, torch.arange(2 * n).roll(n))


def queue_loss(q, k, queue, temperature, normalize=False):
    q, k, queue = (unit(x) if normalize else x for x in (q, k, queue.detach()))
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / temperature
    return cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def sigmoid_loss(q, k, temperature, bias, offset=0, normalize=False):
    q, k = (unit(q), unit(k)) if normalize else (q, k)
    logits = q @ k.T / temperature + bias
    match = torch.arange(len(k)) == torch.arange(len(q))[:, None] + offset
    return F.softplus(torch.where(match, -logits, logits)).sum() / len(q)


def sup_con_loss(z, labels, temperature, base_temperature=None, normalize=False, per_view=False):
    z = unit(z) if normalize else z
    ids = (torch.arange(len(z)) if labels is None else labels).repeat_interleave(z.shape[1])
    z, itself = z.flatten(0, 1), torch.eye(len(ids), dtype=torch.bool)
    log_p = (z @ z.T / temperature).masked_fill(itself, -torch.inf).log_softmax(1)
    positive = (ids == ids[:, None]) & ~itself
    losses = -log_p.where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)
    loss = losses[positive.any(1)].mean() if per_view else losses.mean()
    return loss if base_temperature is None else loss * temperature / base_temperature


def linear_cross_entropy(hidden, weight, targets, temperature, ignore_index=-100):
    keep = targets != ignore_index
    logits = hidden[keep] @ weight.T / temperature
    return cross_entropy(logits, targets[keep]) if keep.any() else logits.sum()


def triplet_loss(anchor, positive, negative, margin=1.0):
    def distance(x, y):
        return (x - y + 1e-6).norm(dim=-1)                     # PyTorch adds 1e-6, too
    return (distance(anchor, positive) - distance(anchor, negative) + margin).clamp(min=0).mean()


def margin_loss(x1, x2, same, margin=1.0):
    distance = (x1 - x2).norm(dim=1)
    return torch.where(same, distance, (margin - distance).clamp(min=0)).square().mean() / 2


def masked_products(q, k=None, temperature=1.0, exclude=None, within=None, similar=None, offset=0,
                    normalize=False):
    """Return q·kᵀ/τ (N, M), with −inf where the mask excludes a column."""
    q, k = (x if x is None or not normalize else unit(x) for x in (q, k))
    k = q if k is None else k
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))
    out = torch.zeros(len(q), len(k), dtype=torch.bool)
    kinds = exclude if isinstance(exclude, tuple) else (exclude,)
    if kinds[0] == "diagonal":
        out |= j == i + offset
    if kinds[0] == "pair":
        out |= (i - j) % (len(q) // 2) == 0
    if len(kinds) > 1:
        out |= kinds[-2][:, None] == kinds[-1]
    if within is not None:
        out |= within[0][:, None] != within[1]
    if similar is not None:
        out |= similar[0] @ similar[1].T >= similar[2]
    return (q @ k.T / temperature).masked_fill(out, -torch.inf)


def similarity_lse(**arguments):
    products = masked_products(**arguments)
    empty = products.isneginf().all(1)                         # rows without columns must have no gradient
    return products.masked_fill(empty[:, None], 0).logsumexp(1).masked_fill(empty, -torch.inf)


def similarity_topk(n, **arguments):
    """Return the n largest products of each row in two equal blocks, like topk in test_kernel_losses.py."""
    products = masked_products(**arguments).topk(n, 1).values.detach()
    return torch.cat([products, products])


# ── the papers ──────────────────────────────────────────────────────────────────────────────────────────────


def moco_loss(q, k, queue, temperature):
    return queue_loss(unit(q), unit(k.detach()), queue, temperature)


def simcse_loss(z1, z2, z3, temperature, hard_negative_weight=0.0, ids=None):
    keys = [z2] if z3 is None else [z2, *(z3[:, None] if z3.dim() == 2 else z3).unbind(1)]
    own, logits = torch.eye(len(z1), dtype=torch.bool), []
    for column, z in enumerate(keys):
        s = cosines(z1, z) / temperature
        s = s + hard_negative_weight * own.double() if column else s
        if ids is not None:                                    # a text equal to the positive is no negative
            equal = ids[:, column] == ids[:, :1]
            s = s.masked_fill(equal & ~own if column == 0 else equal, -torch.inf)
        logits.append(s)
    return cross_entropy(torch.cat(logits, 1), torch.arange(len(z1)))


def selfguided_loss(c, h, temperature, objective):
    views = h if h.dim() == 3 else h[:, None]
    count = views.shape[1]
    if objective == "base":
        return nt_xent(unit(c, 1e-8), unit(views[:, 0], 1e-8), temperature)
    keys, sentence = views.flatten(0, 1), torch.arange(len(c)).repeat_interleave(count)
    if objective == "opt1":
        keys, sentence = torch.cat([keys, c]), torch.cat([sentence, torch.arange(len(c))])
    logits = cosines(c, keys) / temperature
    negatives = logits.masked_fill(sentence == torch.arange(len(c))[:, None], -torch.inf).logsumexp(1)
    positives = cosines(c[:, None], views)[:, 0] / temperature
    return (torch.logaddexp(positives, negatives[:, None]) - positives).mean()


def contrastive_loss(original, synonym, antonym, form):
    near, far = (original * synonym).sum(1), (original * antonym).sum(1)
    if form == "paper":
        return (torch.logaddexp(near, far) - near).mean()
    size = original.shape[1]
    return (F.softplus(-near / size) + F.softplus(far / size)).mean() / 2


def replaced_token_loss(logits, labels, form):
    counted = labels != -100
    logits, labels = logits[counted], labels[counted]
    if form == "paper":                                        # two classes; the logit of "not replaced" is 0
        logits, labels = torch.stack([0 * logits, logits], 1), (labels > 0).long()
    return cross_entropy(logits, labels)


def total_loss(losses, log_variances):
    return ((-log_variances).exp() * losses + log_variances.where(log_variances >= 0, 0)).sum()


def tacl_loss(student, teacher, masked, attention_mask, temperature, form, similarity="cosine"):
    teacher, real = teacher.detach(), attention_mask
    logits = student @ teacher.mT if similarity == "dot" else cosines(student, teacher) / temperature
    if form == "paper":
        logits = logits.masked_fill(~real[:, None], -torch.inf)
    return -logits.log_softmax(2).diagonal(dim1=1, dim2=2)[masked & real].mean()


def ease_loss(z, entity, hard, temperature, hard_logit=0.0, entity_ids=None, hard_ids=None):
    own = torch.eye(len(z), dtype=torch.bool)
    logits = cosines(z, entity) / temperature
    if entity_ids is not None:
        logits = logits.masked_fill((entity_ids == entity_ids[:, None]) & ~own, -torch.inf)
    if hard is not None:
        bonus = hard_logit * own.double().repeat_interleave(hard.shape[1], 1)
        hard = cosines(z, hard.flatten(0, 1)) / temperature + bonus
        if hard_ids is not None:
            hard = hard.masked_fill(hard_ids.flatten() == entity_ids[:, None], -torch.inf)
        logits = torch.cat([logits, hard], 1)
    return cross_entropy(logits, torch.arange(len(z)))


def head(first, second):
    """Return VaSCL's projection head with these weights, a function of embeddings."""
    return lambda e: torch.relu(e @ first.T) @ second.T


def neighbourhood_loss(e, perturbed, first, second, neighbours, temperature, form):
    if form == "code":
        e, perturbed = e.detach(), perturbed.detach()
    z, star = (unit(head(first, second)(x), 1e-8) for x in (e, perturbed))
    z = z.detach() if form == "code" else z
    positive, losses = (z * star).sum(1, keepdim=True) / temperature, []
    near = torch.cat([z[neighbours], star[neighbours]], 1)     # (N, 2K, F)
    for anchor in (z, star):
        logits = torch.cat([positive, (near @ anchor[:, :, None])[:, :, 0] / temperature], 1)
        losses.append(cross_entropy(logits, torch.zeros(len(z), dtype=torch.long)))
    return sum(losses) / 2


def virtual_augmentation(e, first, second, neighbours, noise, radius, temperature, steps):
    project, e, noise = head(first.detach(), second.detach()), e.detach(), noise.detach()
    z, direction = unit(project(e), 1e-8), noise / (noise.norm(dim=1, keepdim=True) + 1e-8)
    for _ in range(steps):                                     # each step replaces the direction
        moved = unit(project(e + radius * direction.requires_grad_()), 1e-8)
        keys = torch.cat([z[:, None], z[neighbours]], 1)
        logits = (keys @ moved[:, :, None])[:, :, 0] / temperature
        loss = cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))
        gradient, = torch.autograd.grad(loss, direction)
        direction = gradient / (gradient.norm(dim=1, keepdim=True) + 1e-8)
    return radius * direction.detach()


def nearest_products(e):
    products = (e @ e.T).detach()
    return products.fill_diagonal_(-torch.inf).topk(4).values


def instance_weights(f1, f2, phi):
    return ((cosines(f1, f2) < phi) | torch.eye(len(f1), dtype=torch.bool)).double()


def dclr_loss(z1, z2, noise, f1, f2, phi, temperature, form):
    logits = cosines(z1, torch.cat([z2, noise.detach()])) / temperature
    own, kept = torch.eye(*logits.shape, dtype=torch.bool), torch.ones_like(logits, dtype=torch.bool)
    kept[:, : len(z2)] = cosines(f1, f2) < phi
    if form == "paper":                                        # an anchor without negatives has loss 0
        negatives = logits.masked_fill(own | ~kept, -torch.inf)
        some = (kept & ~own).any(1)
        return (negatives[some].logsumexp(1) - logits[own][some]).sum() / len(z1)
    log_q = logits.where(kept | own, 0).log_softmax(1)
    return -torch.where(own, log_q, torch.log1p(-log_q.exp())).mean()


def noise_negatives(z1, z2, noise, steps, step_size, temperature, form):
    z1, z2, noise = z1.detach(), z2.detach(), noise.detach()
    for _ in range(steps):
        keys = noise.requires_grad_() if form == "paper" else torch.cat([noise.requires_grad_(), z2])
        total = (cosines(z1, keys) / temperature).logsumexp(1).sum()
        noise = noise.detach() + step_size * unit(torch.autograd.grad(total, noise)[0], 0)
    return noise


def rdrop_loss(logits1, logits2, labels, alpha, form):
    p, q = logits1.softmax(1), logits2.softmax(1)
    divergence = ((p * (p / q).log()).sum(1) + (q * (q / p).log()).sum(1)) / 2
    tasks = cross_entropy(logits1, labels) + cross_entropy(logits2, labels)
    return tasks + alpha * divergence.mean() if form == "paper" else tasks / 2 + alpha * divergence.sum()


def supcon_loss(z, labels, temperature):
    return sup_con_loss(z, labels, temperature, normalize=True, per_view=True)


def ood_contrastive_loss(z, z_adv, labels, temperature, form):
    if form == "paper":
        return sup_con_loss(torch.stack([z, z_adv], 1), labels, temperature, normalize=True)
    same, loss = labels == labels[:, None], 0
    for x, y in ((z, z_adv), (z_adv, z)):
        alike, across = ((cosines(x, other) / temperature).exp() for other in (x, y))
        a = alike.masked_fill(torch.eye(len(x), dtype=torch.bool), 0) + across
        loss = loss - ((a / a.sum(1, keepdim=True)).log() * same).sum(1) / same.sum(1)
    return loss.mean()


def cil_loss(x, a, bags, bag_of, temperature, form):
    """With form "code", negatives are the sentences at the same place in the other bags."""
    if form == "paper":
        negatives, is_used = cosines(x, bags), bag_of[:, None] != torch.arange(len(bags))
    else:
        place = torch.stack([(bag_of[:i] == bag).sum() for i, bag in enumerate(bag_of)])
        negatives = cosines(bags[bag_of], x)
        is_used = (place[:, None] == place) & (bag_of[:, None] != bag_of)
    positive = (unit(x, 1e-8) * unit(a, 1e-8)).sum(1, keepdim=True)
    logits = torch.cat([positive, negatives.masked_fill(~is_used, -torch.inf)], 1) / temperature
    return cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64))


def spearman(x, y):
    """Return Spearman's rank correlation of two vectors; equal values share their mean rank."""
    ranks = []
    for values in (x, y):
        below, equal = values[:, None] > values, values[:, None] == values
        ranks.append(below.double().sum(1) + equal.double().sum(1) / 2)
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()
