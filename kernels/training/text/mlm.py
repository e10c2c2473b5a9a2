"""Masked language models: tokens are masked, and the loss is read from the chosen ones alone."""
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels import embed_in_chunks, linear_cross_entropy


def mask_tokens(ids, may, tokenizer):
    """(masked ids, chosen): 15 % of the tokens that may be are chosen; of these 80 % are masked, 10 %
    replaced (BERT)."""
    chosen = (torch.rand(ids.shape, device=ids.device) < 0.15) & may
    dice = torch.rand(ids.shape, device=ids.device)
    random = torch.randint(len(tokenizer), ids.shape, device=ids.device)
    masked = torch.where(chosen & (dice < 0.8), tokenizer.mask_token_id, ids)
    return torch.where(chosen & (dice >= 0.9), random, masked), chosen


def lm_states(lm, encoder, ids, mask, chosen):
    """(hidden states (n, L, H) of the encoder, states (chosen, H) of the masked-LM head before its decoder),
    in one pass.

    The head is handed the chosen tokens alone, and its decoder, by far the widest layer, none.
    """
    found = []

    def narrow(_, __, output):
        found.append(output.last_hidden_state)
        output.last_hidden_state = found[0][chosen][None]
        return output

    def skip(_, inputs):
        found.append(inputs[0][0])
        return inputs[0][:, :0]

    with encoder.register_forward_hook(narrow), lm.get_output_embeddings().register_forward_pre_hook(skip):
        lm(input_ids=ids, attention_mask=mask)
    return found


def decoder_loss(hidden, decoder, targets, *, impl="auto"):
    """Mean cross entropy of a masked-LM head's last layer, whose (N, V) logits are not stored; scalar, 0
    where N is 0.

    hidden (N, H) is what the decoder reads, decoder a torch.nn.Linear of V rows, targets (N,) are int64.
    """
    if not len(hidden):
        return hidden.sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
    weight = decoder.weight
    if decoder.bias is not None:  # one more feature, 1 in every row; the zeros keep rows aligned
        hidden = torch.cat([hidden, F.pad(torch.ones_like(hidden[:, :1]), (0, 15))], 1)
        weight = torch.cat([weight, F.pad(decoder.bias[:, None], (0, 15))], 1)
    return linear_cross_entropy(hidden, weight, targets, impl=impl)


def free_decoder(lm):
    """The masked LM, its decoder free to leave the word embeddings that it is tied to (SimCSE's released
    code)."""
    decoder = lm.get_output_embeddings()
    decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone())
    return lm


def masked_lm_loss(model, batch, impl="auto"):
    """This rank's part of the mean cross entropy of the tokens chosen in a SentenceEncoder's batch, of all
    ranks."""
    total = lambda group: read_masked(model, group, impl)[1]
    return mean_over_ranks(embed_in_chunks(total, batch, model.lm if model.chunk_size else None))


def read_masked(model, group, impl):
    """((n, H) embeddings of a group whose tokens are masked, (1, 2) the sum of these tokens' cross entropies,
    and how many)."""
    _, ids, mask, *_ = group
    special = torch.tensor(model.tokenizer.all_special_ids, device=model.device)  # padding is one of them
    (masked, chosen), z = mask_tokens(ids, ~torch.isin(ids, special), model.tokenizer), []
    pool = lambda _, __, out: z.append(model.pool_states(out.last_hidden_state, mask, out.hidden_states))
    with (torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16),
          model.encoder.register_forward_hook(pool)):
        _, states = lm_states(model.lm, model.encoder, masked, mask, chosen)
        mean = decoder_loss(states.float(), model.lm.get_output_embeddings(), ids[chosen], impl=impl)
    return z[0], torch.stack([mean * chosen.sum(), chosen.sum().float()])[None]


def mean_over_ranks(sums):
    """This rank's part of a mean, of parts (n, 2) of a sum and of how many it has."""
    loss, tokens = sums.sum(0)
    tokens = tokens.detach()
    if dist.is_initialized():
        dist.all_reduce(tokens)
    return loss / tokens.clamp(min=1)
