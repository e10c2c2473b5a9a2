"""For selfguided.py: pool the states of layers of an encoder."""
import torch

from ..text.tokens import restore_order


def pool_tokens(hidden, mask, pooling):
    """Pool hidden states (n, L, H) over tokens. Return (n, H).

    mask      (n, L): 1 for tokens, including special ones; 0 for padding, which is on the right and ignored.
              A row that is all padding gives finite numbers, not NaN
    pooling   "cls" (the first token) | "last" | "max" | "mean" | "sum"
    """
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        ends = (mask.sum(1) - 1).clamp(min=0)
        return hidden[torch.arange(len(mask), device=mask.device), ends]
    if pooling == "max":
        return hidden.masked_fill(mask[:, :, None] == 0, -1e9).amax(1)
    count = mask.sum(1, keepdim=True).clamp(min=1) if pooling == "mean" else 1
    return (hidden * mask[:, :, None]).sum(1) / count


@torch.no_grad()
def pool_layers(model, encoder, batch, layers, poolings):
    """Pool the hidden states of an encoder. Return (rows, layers, poolings, H) float32, sorted by row index.

    model     the SentenceEncoder that made the batch
    encoder   a transformer with the tokenizer of `model`
    layers    indices of layers; 0 is the embedding layer
    """
    pieces = []
    for _, ids, mask in batch:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, **model.no_cache)
        states = (output.hidden_states[layer].float() for layer in layers)
        pooled = [torch.stack([pool_tokens(x, mask, pooling) for pooling in poolings], 1) for x in states]
        pieces.append(torch.stack(pooled, 1))
    return restore_order(torch.cat(pieces), batch)
