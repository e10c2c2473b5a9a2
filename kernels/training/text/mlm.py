"""Masked language modelling (MLM): choose and mask tokens, and compute the loss of the chosen tokens only."""
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels import embed_in_chunks, linear_cross_entropy


def mask_tokens(ids, maskable, tokenizer):
    """Mask tokens as BERT does. Return (masked ids, bool mask of the chosen tokens). 15 % of the maskable
    tokens are chosen. Of these, 80 % become the mask token, 10 % a random token, and 10 % stay unchanged."""
    chosen = (torch.rand(ids.shape, device=ids.device) < 0.15) & maskable
    draw = torch.rand(ids.shape, device=ids.device)
    random = torch.randint(len(tokenizer), ids.shape, device=ids.device)
    masked = torch.where(chosen & (draw < 0.8), tokenizer.mask_token_id, ids)
    return torch.where(chosen & (draw >= 0.9), random, masked), chosen


def encoder_and_mlm_states(lm, encoder, ids, mask, chosen):
    """Run a masked language model (LM) without its decoder, which is the output layer over the vocabulary.

    returns     [last hidden states (n, L, H) of the encoder, hidden states of all layers or None, inputs
                (C, H) of the decoder for the C chosen tokens]
    """
    found = []

    def keep_chosen(_, __, output):            # the MLM head gets the chosen tokens only
        found.extend([output.last_hidden_state, output.hidden_states])
        output.last_hidden_state = output.last_hidden_state[chosen][None]
        return output

    def skip_decoder(_, inputs):               # the decoder runs on 0 tokens
        found.append(inputs[0][0])
        return inputs[0][:, :0]

    decoder = lm.get_output_embeddings()
    with encoder.register_forward_hook(keep_chosen), decoder.register_forward_pre_hook(skip_decoder):
        lm(input_ids=ids, attention_mask=mask)
    return found


def decoder_loss(hidden, decoder, targets, *, impl="auto"):
    """Return the mean cross entropy of a decoder, without storing many (N, V) logits. Return 0 if N is 0.

    hidden      (N, H) states that the decoder reads
    decoder     torch.nn.Linear with V output features
    targets     (N,) int64, the correct token ids
    """
    if not len(hidden):
        return hidden.sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
    weight = decoder.weight
    if decoder.bias is not None:               # the bias is one more feature; 15 zeros align rows in memory
        hidden = torch.cat([hidden, F.pad(torch.ones_like(hidden[:, :1]), (0, 15))], 1)
        weight = torch.cat([weight, F.pad(decoder.bias[:, None], (0, 15))], 1)
    return linear_cross_entropy(hidden, weight, targets, impl=impl)


def untie_decoder(lm):
    """Separate a masked LM's decoder weights from its word embeddings (SimCSE's code)."""
    decoder = lm.get_output_embeddings()
    decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone())


def masked_lm_loss(model, batch, impl="auto", protected=None):
    """Mask tokens of a batch from SentenceEncoder.batch. Return this rank's part of the mean cross entropy of
    the chosen tokens of all ranks. embed_masked explains `protected`."""
    sums = embed_in_chunks(lambda group: embed_masked(model, group, impl, protected)[1], batch,
                           model.lm if model.chunk_size else None)
    return share_of_mean(sums)


def embed_masked(model, group, impl, protected=None):
    """Mask tokens in one group of a batch (SentenceEncoder.batch), and run the encoder and the MLM head.

    protected   function from ids (n, L) to bool (n, L): True for tokens to keep, besides special tokens
    returns     (embeddings (n, H), float (1, 2): sum of the chosen tokens' cross entropies, and their number)
    """
    _, ids, mask, *_ = group
    special = torch.tensor(model.tokenizer.all_special_ids, device=model.device)       # these include padding
    maskable = ~torch.isin(ids, special)
    if protected is not None:
        maskable &= ~protected(ids)
    masked, chosen = mask_tokens(ids, maskable, model.tokenizer)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        hidden, layers, states = encoder_and_mlm_states(model.lm, model.encoder, masked, mask, chosen)
        z = model.pool_states(hidden, mask, layers)
        mean = decoder_loss(states.float(), model.lm.get_output_embeddings(), ids[chosen], impl=impl)
    return z, torch.stack([mean * chosen.sum(), chosen.sum().float()])[None]


def share_of_mean(sums):
    """Return this rank's part of the mean over all ranks, from `sums` (n, 2): this rank's sums and counts."""
    loss, tokens = sums.sum(0)
    tokens = tokens.detach()
    if dist.is_initialized():
        dist.all_reduce(tokens)
    return loss / tokens.clamp(min=1)
