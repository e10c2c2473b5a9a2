"""Labelled texts: the scores of a classifier against formulas written out, tokens and batches of each kind of
classifier."""
import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, BertTokenizer

from kernels.training.labels import classify, confusion_scores, make_batch, tokenise_texts


@pytest.mark.parametrize("labels, n", [(["0", "1"], 40), (["no", "yes"], 40), (["a", "b", "c", "d"], 60)])
def test_confusion_scores(labels, n):
    """d occurs nowhere and has no part in the mean; Matthews' is a correlation of one-hot rows."""
    rng = np.random.default_rng(0)
    truth, said = rng.integers(0, min(len(labels), 3), (2, n))
    said[: n // 2] = truth[: n // 2]
    f1 = []
    for c in range(min(len(labels), 3)):
        hits = sum((truth == c) & (said == c))
        f1.append(2 * hits / (sum(truth == c) + sum(said == c)))
    one, two = (np.eye(len(labels))[x] - np.eye(len(labels))[x].mean(0) for x in (truth, said))
    scores = confusion_scores(truth, said, labels)
    assert scores["accuracy"] == pytest.approx((truth == said).mean())
    assert scores["matthews"] == pytest.approx((one * two).sum() / math.sqrt((one**2).sum() * (two**2).sum()))
    assert scores["f1"] == pytest.approx(f1[1] if labels == ["0", "1"] else np.mean(f1))


def test_matthews_by_hand():
    """6 true positives, 3 true negatives, 1 false positive, 2 false negatives; a constant answer has 0."""
    truth, said = np.repeat([1, 0, 0, 1], [6, 3, 1, 2]), np.repeat([1, 0, 1, 0], [6, 3, 1, 2])
    wanted = (6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5)
    assert confusion_scores(truth, said, ["0", "1"])["matthews"] == pytest.approx(wanted)
    assert confusion_scores(truth, np.ones(12, int), ["0", "1"])["matthews"] == 0


BERT = dict(vocab_size=120, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
T5 = dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, eos_token_id=3, decoder_start_token_id=0)
KINDS = {"distilbert": dict(vocab_size=120, dim=16, n_layers=1, n_heads=2, hidden_dim=32),
         "roberta": dict(**BERT, type_vocab_size=2, pad_token_id=0),
         "electra": dict(**BERT, embedding_size=16),
         "gpt2": dict(vocab_size=120, n_embd=16, n_layer=1, n_head=2),
         "xlnet": dict(vocab_size=120, d_model=16, n_layer=1, n_head=2, d_inner=32),
         "t5": dict(vocab_size=120, pad_token_id=0, **T5)}


def small_tokenizer(kind):
    """One token a letter. XLNet reads its last token, so it pads left."""
    letters = "abcdefghijklmnopqrstuvwxyzøşłé.,'\"!?"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    return BertTokenizer({piece: i for i, piece in enumerate(pieces)}, model_max_length=200,
                         padding_side="left" if kind == "xlnet" else "right")


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_is_its_rows_alone(kind, pairs):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, num_labels=3, **KINDS[kind])
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.tokenizer, model.bf16 = small_tokenizer(kind), False
    model.config.pad_token_id = 0
    texts = [("No.", "Yes."), ("She sang a very long song.", "So?"), ("He ran away", "He left the town")]
    rows, cut = tokenise_texts([(text[: 1 + pairs], 2) for text in texts], model, 20)
    assert cut == 1 + pairs and max(len(row["input_ids"]) for row, _ in rows) == 20
    assert all(row["input_ids"].dtype == np.int32 for row, _ in rows)
    inputs, labels = make_batch(rows, model)
    assert labels.tolist() == [2, 2, 2] and inputs["input_ids"].shape == (3, 20)
    with torch.no_grad():
        together = classify(model, inputs)
        alone = torch.cat([classify(model, make_batch([row], model)[0]) for row in rows])
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=0)
