"""For selfguided.py: pool the states of layers of an encoder over tokens."""
import torch

from ..text.tokens import restore_order


def pool_tokens(hidden, mask, pooling):
    """Pool hidden states (n, L, H) over tokens by "max", "mean" or "sum". Return (n, H). mask (n, L) is 1 for
    tokens, including special ones, and 0 for padding."""
    if pooling == "max":
        return hidden.masked_fill(mask[:, :, None] == 0, -1e9).amax(1)
    total = (hidden * mask[:, :, None]).sum(1)
    return total / mask.sum(1, keepdim=True) if pooling == "mean" else total


@torch.no_grad()
def pool_layers(model, encoder, batch, layers, pooling):
    """Pool the hidden states of an encoder. Return (rows, layers, H) float32, sorted by row index.

    model     the SentenceEncoder that made the batch
    encoder   a transformer with the tokenizer of `model`
    layers    indices of layers; 0 is the embedding layer
    """
    pieces = []
    for _, ids, mask in batch:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, **model.no_cache)
        states = (output.hidden_states[layer].float() for layer in layers)
        pieces.append(torch.stack([pool_tokens(state, mask, pooling) for state in states], 1))
    return restore_order(torch.cat(pieces), batch)
