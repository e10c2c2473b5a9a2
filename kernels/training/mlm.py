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


def has_decoder(lm):
    """Whether its head ends in a linear layer that reads a state of each token; MobileBERT's does not."""
    decoder, training, ids, seen = lm.get_output_embeddings(), lm.training, torch.tensor([[2, 3]]), []
    if not isinstance(decoder, torch.nn.Linear):
        return False
    try:
        with torch.no_grad(), decoder.register_forward_pre_hook(lambda *given: seen.append(given)):
            lm.eval()(input_ids=ids, attention_mask=ids > 0)
    except Exception:                                          # it wants more than texts
        return False
    lm.train(training)
    return bool(seen)


def free_decoder(lm):
    """The masked LM, its decoder free to leave the word embeddings that it is tied to (SimCSE's released
    code)."""
    decoder = lm.get_output_embeddings()
    decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone())
    return lm


def masked_lm_loss(model, batch, impl="auto"):
    """This rank's part of the mean cross entropy of the tokens chosen in a SentenceEncoder's batch, of all
    ranks."""
    special = torch.tensor(model.tokenizer.all_special_ids, device=model.device)  # padding is one of them

    def total(group):
        """(1, 2): the sum of a group's cross entropies, and of how many tokens."""
        _, ids, mask, *_ = group
        masked, chosen = mask_tokens(ids, ~torch.isin(ids, special), model.tokenizer)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            _, states = lm_states(model.lm, model.encoder, masked, mask, chosen)
            mean = decoder_loss(states.float(), model.lm.get_output_embeddings(), ids[chosen], impl=impl)
        return torch.stack([mean * chosen.sum(), chosen.sum().float()])[None]

    loss, tokens = embed_in_chunks(total, batch, model.lm if model.chunk_size else None).sum(0)
    tokens = tokens.detach()
    if dist.is_initialized():
        dist.all_reduce(tokens)
    return loss / tokens.clamp(min=1)
