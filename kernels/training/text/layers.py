"""The hidden states of every layer of an encoder, pooled over tokens."""
import torch

from .tokens import in_order


def pool_tokens(hidden, mask, pooling):
    """Pool hidden states (n, L, H) over tokens to (n, H).

    mask      (n, L): 1 for tokens, special ones too; 0 for padding, which is on the right and does not count.
              A row of padding only gives no NaN
    pooling   "cls", the first token | "last" | "max" | "mean" | "sum"
    """
    if pooling in ("cls", "last"):
        ends = (mask.sum(1) - 1).clamp(min=0) * (pooling == "last")
        return hidden[torch.arange(len(mask), device=mask.device), ends]
    if pooling == "max":
        return hidden.masked_fill(mask[:, :, None] == 0, -1e9).amax(1)
    count = mask.sum(1, keepdim=True).clamp(min=1) if pooling == "mean" else 1
    return (hidden * mask[:, :, None]).sum(1) / count


@torch.no_grad()
def pool_layers(model, encoder, batch, layers, poolings):
    """(rows, layers, poolings, H) float32 in the order of the batch's rows; layer 0 is the word embeddings.

    model     a SentenceEncoder, which made the batch; encoder is one that reads the same tokens
    """
    pieces = []
    for _, ids, mask in batch:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, **model.no_cache)
        states = (output.hidden_states[layer].float() for layer in layers)
        pooled = [torch.stack([pool_tokens(x, mask, pooling) for pooling in poolings], 1) for x in states]
        pieces.append(torch.stack(pooled, 1))
    return in_order(torch.cat(pieces), batch)
