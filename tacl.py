"""TaCL: Improving BERT Pre-training with Token-aware Contrastive Learning. Su, Liu, Meng, Lan, Shu, Shareghi, Collier, Findings of
NAACL 2022, arXiv 2111.04198.

A pretrained BERT, the student, goes on with its masked-LM and next-sentence losses. A frozen copy of it, the teacher, reads the
same sequence without masks. Where the student reads a mask at place i, its token is pulled to the teacher's at place i and pushed
from the teacher's other tokens of that sequence: the tokens of a sentence move apart. With s of the student, t of the teacher,
sim = cos, and M the places chosen for masking,

    L = L_MLM + L_NSP + mean over i in M of −log( exp(sim(s_i, t_i) / τ) / Σ_{j of the same sequence} exp(sim(s_i, t_j) / τ) )

Data: one sentence a line, a blank line between documents. The file is read as a stream, --buffer documents at a time.
--dev is such a file too. It gives the losses, how often the nearest of the teacher's tokens is the one in the same place, and the
mean cosine of a sentence's tokens in each layer, before and after, which python -m kernels.pictures draws.

    awk '{f = NR > 520 ? "dev.txt" : "train.txt"; print > f} NR % 8 == 0 {print "" > f}' tests/data/sentences.txt
    python tacl.py --model scratch --data train.txt --dev dev.txt
    torchrun --nproc-per-node 8 tacl.py --data wikipedia.txt --dev held-out.txt --out out/tacl

Expected: from BERT-base, 150,000 steps on Wikipedia, fine-tuned with the standard scripts: GLUE 79.6 → 81.2, SQuAD 1.1
80.8/88.5 → 81.6/89.0, SQuAD 2.0 73.4/76.8 → 74.4/77.5 (EM/F1). Token similarity falls strongly in the top layers.

The released code pads every sequence to --max-length, and its denominator holds the teacher's output there too: --form code. In both
forms the mean is over the chosen tokens of the global batch (the paper prints a sum, the code has a mean of the GPUs' means), the
teacher has no dropout (the author agrees), and pairs come from a stream, anew in every round (there once, all in memory).
"""
import argparse, copy, datetime, functools, hashlib, itertools, json, logging, math, os, random, re, shutil, signal, sys, time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file                        # comes with transformers, as tokenizers and tqdm
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tqdm import tqdm
from transformers import AutoModelForPreTraining, AutoTokenizer, BertConfig, BertTokenizer

from kernels import choose_impl, linear_cross_entropy, own_rows, similarity_lse, similarity_topk

# ── flags ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error, add = fail, parser.add_argument
    add("--form", choices=("paper", "code"), default="paper", help="whose denominator; code: padding counts; default paper")
    add("--teacher", help="hub name or local folder of equal width and vocabulary; default the student as it begins (paper)")
    add("--similarity", choices=("cosine", "dot"), default="cosine", help="dot: plain products, no τ; default cosine (paper)")
    add("--whole-word", action="store_true", help="choose whole words for masking (released code's option)")
    add("--accumulate", type=at_least(1, int), default=1, help="parts that a batch is computed in, to save memory; default 1")
    add("--buffer", type=at_least(2, int), default=10_000, help="documents in memory; default 10000")
    add("--dev-pairs", type=at_least(1, int), default=1000, help="pairs, and sentences, of --dev that count; default 1000")
    add("--data", required=True, help="training data; see above")
    add("--dev", help="documents to evaluate on, before and after; none: no evaluation")
    add("--model", default="bert-base-uncased", help="hub name, local folder, or from scratch; default bert-base-uncased, from scratch: scratch")
    add("--out", default="out/tacl", help="folder to write; default out/tacl")
    add("--batch-size", type=at_least(1, int), help="over all GPUs; default 256 (paper), scratch 32")
    add("--steps", type=at_least(1, int), help="length of the training in steps; default 150000 (paper), scratch 300")
    add("--lr", type=at_least(0), help="learning rate; default 1e-4 (paper), scratch 2e-3")
    add("--temperature", type=at_least(1e-4), default=0.01, help="τ; default 0.01 (paper)")
    add("--max-length", type=at_least(5, int), help="tokens of a pair, [CLS] and both [SEP] included; default 256 (paper), scratch 64")
    add("--seed", type=at_least(0, int), default=42, help="default 42")
    add("--eval-every", type=at_least(1, int), default=10_000, help="steps between evaluations; default 10000 (released script)")
    add("--resume", action="store_true", help="continue the run in --out from its last evaluation, with the same flags")
    add("--impl", default="auto", choices=("auto", "triton", "blockwise", "eager"), help="kernels; default auto")
    add("--precision", choices=["bf16", "fp32"], help="of the encoder, by default bf16 on a GPU and fp32 on a CPU; newer CPUs are fast in bf16")
    return parser


# What a flag is where it was not given: the paper's, and a small random BERT's.
PAPER = dict(batch_size=256, steps=150_000, lr=1e-4, max_length=256)
SCRATCH = dict(batch_size=32, steps=300, lr=2e-3, max_length=64)


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_data(path, args):
    """How many documents of at least two sentences a file holds; it is read once, to be checked, and not kept."""
    for name, value in (SCRATCH if args.model == "scratch" else PAPER).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    quiet = os.environ.get("RANK", "0") != "0" or None         # None: a bar on a terminal only
    try:
        bar = tqdm(read_documents(path), desc=path, unit=" documents", disable=quiet, leave=False)
        sizes = Counter(min(len(sentences), 2) for sentences, _ in bar)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    if sizes[2] < 2:
        fail(f"{path}: {sizes[2]} documents of two or more sentences, wanted at least 2; a sentence a line, a blank line between documents")
    say(Path(__file__).stem, f"{sizes[2]:,} documents from {path}; {sizes[1]:,} of one sentence are left out")
    return sizes[2]


def read_documents(path, offset=0):
    """Yields ([sentence, ...], byte after them) of each document from a byte of the file on."""
    sentences = []
    with open(path, "rb") as file:
        file.seek(offset)
        for number, line in enumerate(file, 1):
            offset += len(line)
            try:
                sentence = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError:
                fail(f"{path} line {number}: not UTF-8; convert it, for example with iconv")
            if sentence:
                sentences.append(sentence)
            elif sentences:
                yield sentences, offset
                sentences = []
        if sentences:
            yield sentences, offset


def next_documents(path, offset, count, model):
    """(the next count documents of at least two sentences from a byte on, round the file's end, as lists of ids; byte after)."""
    documents = (found for start in itertools.chain([offset], itertools.repeat(0)) for found in read_documents(path, start))
    found, ends = zip(*itertools.islice((found for found in documents if len(found[0]) > 1), count))
    flat, _ = tokenise([sentence for sentences in found for sentence in sentences], model, 514)
    ids = (row[1:-1] for row in flat)                          # without [CLS] and [SEP]: at most 512 (released code)
    documents = [[row for row in (next(ids) for _ in sentences) if len(row)] for sentences in found]
    documents = [document for document in documents if document]
    if len(documents) < 2:
        fail(f"{path}: {len(documents)} of {count:,} documents from byte {offset:,} on hold words of the tokenizer, wanted 2")
    return documents, ends[-1]


def sentence_pairs(documents, model, args, rng):
    """[(ids (L,), where the second segment is (L,), whether B is random)] of documents of tokenised sentences, in random order:
    [CLS] A [SEP] B [SEP] as BERT's generator makes them.

    Sentences of a document are taken in turn until they fill a pair, or, in a tenth of the documents, a random part of one. A is
    a random number of the first; B is the rest or, half of the time, a stretch of another document, the rest being put back.
    Where there is no rest, B is random. The longer one, B where they are equal, then loses tokens at random ends until they fit.
    """
    cls, sep, pairs, most = [model.tokenizer.cls_token_id], [model.tokenizer.sep_token_id], [], args.max_length - 3
    for place, document in enumerate(documents):
        target, start = rng.randint(2, most) if rng.random() < 0.1 else most, 0
        while start < len(document):
            end, length = start, 0
            while end < len(document) and length < target:
                length, end = length + len(document[end]), end + 1
            split = start + (rng.randint(1, end - start - 1) if end - start > 1 else 1)
            a, b = document[start:split], document[split:end]
            is_random = not b or rng.random() < 0.5
            if is_random:
                other = documents[(place + rng.randrange(1, len(documents))) % len(documents)]
                at, wanted, b, end = rng.randrange(len(other)), target - sum(map(len, a)), [], split
                while not b or at < len(other) and sum(map(len, b)) < wanted:
                    b.append(other[at])
                    at += 1
            a, b = np.concatenate(a), np.concatenate(b)
            while len(a) + len(b) > most:                      # views: nothing is copied
                front = rng.random() < 0.5
                a, b = (a[front : len(a) - 1 + front], b) if len(a) > len(b) else (a, b[front : len(b) - 1 + front])
            ids = np.concatenate([cls, a, sep, b, sep], dtype=np.int32)
            pairs.append((ids, np.arange(len(ids)) >= len(a) + 2, is_random))
            start = end
    rng.shuffle(pairs)
    return pairs


def stream(count, place, model, args):
    """Yields (a pair, the place after it) endlessly from a place on: [byte, buffer, pairs used of it].

    Documents come in the order of the file, round its end, --buffer at a time, and their pairs are shuffled. A buffer depends
    on the seed, its number and the byte where it begins, and on nothing else. The next one is made meanwhile.
    """
    def fill(byte, number):
        documents, end = next_documents(args.data, byte, min(count, args.buffer), model)
        return sentence_pairs(documents, model, args, random.Random(f"{args.seed} pairs {number}")), end

    byte, number, used = place
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(fill, byte, number)
        while True:
            pairs, end = following.result()
            following = pool.submit(fill, end, number + 1)
            for used in range(used, len(pairs)):
                yield pairs[used], [byte, number, used + 1]
            byte, number, used = end, number + 1, 0


def choose_and_mask(ids, model, args, rng):
    """(masked ids, chosen): 15 % of the tokens that are not special are chosen; of these 80 % become [MASK], 10 % a random token.

    At most a quarter of --max-length are chosen, and at least one where there is any. With --whole-word 15 % of the words are,
    at most a quarter, and each piece of one has its own luck.
    """
    words = []
    for place, token in enumerate(ids.tolist()):
        if args.whole_word and token in model.continuing and words and words[-1][-1] == place - 1:
            words[-1].append(place)
        elif token not in model.special:
            words.append([place])
    most, length = (len(words) // 4, len(words)) if args.whole_word else (int(0.25 * args.max_length), len(ids))
    masked, chosen = ids.copy(), np.zeros(len(ids), bool)
    for word in rng.sample(words, min(most, max(1, round(0.15 * length)), len(words))):
        for place in word:
            chosen[place], luck = True, rng.random()
            if luck < 0.8:
                masked[place] = model.tokenizer.mask_token_id
            elif luck < 0.9:
                masked[place] = rng.choice(model.ordinary)
    return masked, chosen


def make_batch(rows, model, args):
    """[(ids, masked ids, segments, real, chosen (n, L), labels (n,))]: rows in --accumulate parts of similar length, on the device.

    A row is (ids, second segment, label, masked ids, chosen). The paper's form pads to a part's longest, the code's to --max-length.
    """
    rows, parts, blank = sorted(rows, key=lambda row: len(row[0])), [], model.tokenizer.pad_token_id
    size = math.ceil(len(rows) / args.accumulate)
    for i in range(0, len(rows), size):
        ids, segments, labels, masked, chosen = zip(*rows[i : i + size])
        lengths = torch.tensor([len(row) for row in ids])
        width = args.max_length if args.form == "code" else lengths.max()
        real = torch.arange(width) < lengths[:, None]
        ids, masked, segments, chosen = (
            torch.full(real.shape, fill).masked_scatter(real, torch.from_numpy(np.concatenate(column)).to(torch.int64))
            for column, fill in ((ids, blank), (masked, blank), (segments, 0), (chosen, 0)))
        part = ids, masked, segments, real, chosen.bool(), torch.tensor(labels, dtype=torch.int64)
        parts.append([x.to(model.device) for x in part])
    return parts


def load_dev(path, documents, model, args):
    """(rows of pairs, rows of sentences) for make_batch, the same at every evaluation; "chosen" of a sentence are all its words."""
    rng, cls, sep = random.Random(f"{args.seed} dev"), [model.tokenizer.cls_token_id], [model.tokenizer.sep_token_id]
    documents, _ = next_documents(path, 0, min(documents, args.dev_pairs), model)
    pairs = sentence_pairs(documents, model, args, rng)[: args.dev_pairs]
    rows = [np.concatenate([cls, row[: args.max_length - 2], sep]) for document in documents for row in document]
    rows = sorted(rows[: args.dev_pairs], key=len)
    return ([(*pair, *choose_and_mask(pair[0], model, args, rng)) for pair in pairs],
            [(ids, ids < 0, 0, ids, np.arange(len(ids)) % (len(ids) - 1) > 0) for ids in rows])


# ── model ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def build_model(args):
    """The student with its heads, and the frozen teacher, which neither train() nor the optimizer nor state.pt reaches."""
    model = torch.nn.Module()
    model.device, model.bf16 = torch.device(args.device), args.precision == "bf16"
    model.lm, model.tokenizer, model.fresh = load_pretraining("--model", args.model, args)
    model.encoder, width = model.lm.base_model, model.lm.config.hidden_size
    model.nsp = None                                           # BERT has its own
    if not hasattr(getattr(model.lm, "cls", None), "seq_relationship"):
        model.nsp = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))
        model.nsp.apply(model.lm._init_weights)
        model.fresh.append("next sentence")
    teacher = copy.deepcopy(model.encoder)
    if args.teacher:
        lm, tokenizer, _ = load_pretraining("--teacher", args.teacher, args)
        teacher, found = lm.base_model, lm.config.hidden_size
        if found != width:
            fail(f"--teacher {args.teacher}: its vectors have {found} numbers, those of {args.model} {width}; wanted equal widths")
        if tokenizer.get_vocab() != model.tokenizer.get_vocab():
            fail(f"--teacher {args.teacher}: its vocabulary is not that of {args.model}; wanted one tokenizer for both")
    model.teacher = (teacher.eval().requires_grad_(False).to(model.device),)                 # in a tuple: no part of the module
    longest = [model.tokenizer.model_max_length]
    for encoder in (model.encoder, teacher):
        padding = getattr(getattr(encoder.embeddings, "position_embeddings", None), "padding_idx", None)       # as RoBERTa's
        longest.append(encoder.config.max_position_embeddings - (0 if padding is None else padding + 1))
    if args.max_length > min(longest):
        fail(f"--max-length {args.max_length}: {args.model}{' with its teacher' * bool(args.teacher)} reads at most {min(longest)} tokens")
    names = model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    model.special = set(model.tokenizer.all_special_ids)
    model.ordinary = [token for token in range(1, len(names)) if token not in model.special]
    model.continuing = {token for token, name in enumerate(names) if name.startswith("##")}
    if args.whole_word and not model.continuing:
        fail(f"--whole-word: the tokenizer of {args.model} has no pieces that begin with ##")
    return model.to(model.device)


def load_pretraining(flag, name, args):
    """(model with a masked-LM head, tokenizer, layers of its heads that the checkpoint lacks) of a folder or a hub name; scratch is
    a small random BERT with word pieces of the data file."""
    if name == "scratch":
        words = Counter()
        normalise, cut = BertNormalizer().normalize_str, BertPreTokenizer().pre_tokenize_str
        for sentences, _ in read_documents(args.data):
            words.update(word for word, _ in cut(normalise("\n".join(sentences))))
        letters = sorted(set("".join(words)))                  # tokenizers' own trainer breaks ties anew in every process
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
        pieces += [word for word, times in words.most_common(8000) if times > 1 and len(word) > 1]
        tokenizer = BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, model_max_length=512)
        shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
        config = BertConfig(vocab_size=len(tokenizer), **shape)
        return AutoModelForPreTraining.from_config(config, attn_implementation="sdpa"), tokenizer, []
    if not Path(name).is_dir():
        say("hub", f"{name} is fetched, unless it is in the cache")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, info = AutoModelForPreTraining.from_pretrained(name, attn_implementation="sdpa", dtype=torch.float32,
                                                              output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:                                 # whatever the network or a damaged file makes of it
        if Path(name).is_dir():
            fail(f"{flag} {name}: {type(error).__name__}: {str(error).strip()}".splitlines()[0])
        fail(f"{flag} {name}: no such folder, and the hub does not give it; name a local folder, or take scratch")
    if not tokenizer.is_fast:
        fail(f"{flag} {name}: {type(tokenizer).__name__} is a slow tokenizer; wanted one with a tokenizer.json")
    fresh = (*info["missing_keys"], *(part for part, *_ in info["mismatched_keys"]))         # random
    fresh = [part.removeprefix(f"{model.base_model_prefix}.") for part in fresh]
    lost = [part for part in fresh if part in model.base_model.state_dict() and "pooler" not in part]
    what = f"{len(lost)} weights, such as {min(lost)}," if lost else "the words of its tokenizer"
    if lost or len(tokenizer) <= len(tokenizer.all_special_ids):
        fail(f"{flag} {name}: {what} are missing or do not fit its config.json")
    head = isinstance(model.get_output_embeddings(), torch.nn.Linear) and hasattr(model.base_model, "embeddings")
    if not head or None in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id):
        fail(f"{flag} {name}: {type(model).__name__} is no masked language model like BERT or DistilBERT")
    return model, tokenizer, sorted({part.rpartition(".")[0] for part in fresh})


def read(model, ids, segments, real, layers=True):
    """The output of an encoder, or of a model around it; layers: with the hidden states of each."""
    known = {"token_type_ids": segments} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
    return model(input_ids=ids, attention_mask=real, output_hidden_states=layers, **known)


def embed(model, ids, segments, real, chosen):
    """(last hidden states (n, L, H), what the decoder would read at the chosen tokens, next-sentence logits (n, 2))."""
    taken = []                                                 # the decoder, by far the widest layer, is handed no token
    with model.lm.get_output_embeddings().register_forward_pre_hook(lambda _, x: taken.append(x[0][chosen].float()) or (x[0][:0],)):
        output = read(model.lm, ids, segments, real)
    hidden = output.hidden_states[-1]
    return hidden, taken[0], output.seq_relationship_logits if model.nsp is None else model.nsp(hidden[:, 0])


# ── the paper ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compute_loss(model, batch, args):
    """The three losses of a part of a batch; a token weighs token_weight and a pair pair_weight in the means over all of it."""
    (ids, masked, segments, real, chosen, labels), token_weight, pair_weight = batch
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        student, at_chosen, next_logits = embed(model, masked, segments, real, chosen)
        with torch.no_grad():
            teacher = read(model.teacher[0], ids, segments, real, layers=False).last_hidden_state
        contrast = tacl_loss(student, teacher, chosen, real, args.temperature, args.form,
                             similarity=args.similarity, impl=args.impl)
        mlm = decoder_loss(at_chosen, model.lm.get_output_embeddings(), ids[chosen], impl=args.impl)
    nsp = F.cross_entropy(next_logits.float(), labels)
    tokens = len(at_chosen) * token_weight
    values = {"mlm": mlm * tokens, "nsp": nsp * len(labels) * pair_weight, "contrast": contrast * tokens}
    loss = sum(values.values())
    values = {"loss": loss.detach()} | {name: value.detach() for name, value in values.items()}
    if not model.training:
        q, k, groups, own = pack(student, teacher, chosen, real, args.form, args.similarity)
        nearest = similarity_topk(q, k, 1, within=groups, impl=args.impl)[1][:, 0] if len(q) else own
        values["accuracy"] = 100 * (nearest == own).sum() * token_weight
    return loss, values


def tacl_loss(student, teacher, masked, attention_mask=None, temperature=0.01, form="paper", *, similarity="cosine", impl="auto"):
    """Mean over anchors of −log softmax, among the teacher's tokens of its own sequence, of the one in the anchor's place.

    student, teacher   (B, L, D) raw hidden states of the masked and of the plain sequences, any float type; normalised here, a zero
                       vector has cosine 0 with all; no gradient reaches the teacher
    masked             (B, L) bool or integers: the chosen tokens, which are the anchors
    attention_mask     (B, L) bool or integers, 0 at padding, which is never an anchor; None: no padding
    form               "paper": the denominator holds a sequence's tokens | "code": and its padding
    similarity         "cosine" | "dot": plain products, not divided by the temperature (released code's option)
    returns            scalar float32, float64 for float64; no anchor: 0 with gradient 0
    raises             ValueError naming the argument, what it was and what is wanted
    memory             beside copies of the anchors and of the teacher's tokens that of similarity_lse: no (B, L, L) similarities
    source             Su et al. 2022, the token-aware contrastive objective; the mean instead of the sum is the released code's
    """
    q, k, groups, own = pack(student, teacher, masked, attention_mask, form, similarity)
    if not len(q):
        return q.sum(dtype=torch.promote_types(q.dtype, torch.float32))
    temperature = temperature if similarity == "cosine" else 1.0
    others = similarity_lse(q, k, temperature, exclude=(own, torch.arange(len(k), device=k.device)), within=groups, impl=impl)
    positive = torch.linalg.vecdot(q.to(others.dtype), k[own].to(others.dtype)) / temperature
    return -F.logsigmoid(positive - others).mean()             # = log(exp positive + exp others) - positive


def pack(student, teacher, masked, attention_mask, form, similarity):
    """(anchors (N, D), teacher's tokens (M, D), (sequence of each anchor, of each token), each anchor's own token (N,)): all
    sequences one after the other. M has no padding in the paper's form."""
    for name, x, wanted in (("student", student, (*masked.shape, teacher.shape[-1])), ("teacher", teacher, student.shape),
                            ("attention_mask", attention_mask, masked.shape)):
        if x is not None and x.shape != wanted:
            raise ValueError(f"{name}: {tuple(x.shape)}, wanted {tuple(wanted)}, as masked is (B, L)")
    for name, value, wanted in (("form", form, ("paper", "code")), ("similarity", similarity, ("cosine", "dot"))):
        if value not in wanted:
            raise ValueError(f"{name}: {value!r}, wanted {' or '.join(wanted)}")
    real = torch.ones_like(masked, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    anchors = masked.bool() & real
    columns = real if form == "paper" else torch.ones_like(real)
    own = (columns.flatten().cumsum(0) - 1)[anchors.flatten()]
    sequence = torch.arange(len(real), device=real.device)[:, None].expand_as(real)
    q, k = student[anchors], teacher.detach()[columns]
    if similarity == "cosine":
        eps = max(1e-8, torch.finfo(k.dtype).tiny)
        q = F.normalize(q, dim=1, eps=eps)
        F.normalize(k, dim=1, eps=eps, out=k)
    return q, k, (sequence[anchors], sequence[columns]), own


def decoder_loss(hidden, decoder, targets, *, impl="auto"):
    """Mean cross entropy of a masked-LM head's last layer, whose (N, V) logits are not stored; scalar, 0 where N is 0.

    hidden (N, H) is what the decoder reads, decoder a torch.nn.Linear of V rows, targets (N,) are int64.
    """
    if not len(hidden):
        return hidden.sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
    weight = decoder.weight
    if decoder.bias is not None:                               # one more feature, 1 in every row; the zeros keep rows aligned
        hidden = torch.cat([hidden, F.pad(torch.ones_like(hidden[:, :1]), (0, 15))], 1)
        weight = torch.cat([weight, F.pad(decoder.bias[:, None], (0, 15))], 1)
    return linear_cross_entropy(hidden, weight, targets, impl=impl)


def token_similarity(hidden, mask):
    """(B,) mean cosine of two different tokens of each sequence: hidden (B, L, D), mask (B, L) bool. Fewer than two: NaN.

    No (L, L) similarities: Σ_{i≠j} u_i·u_j = |Σ u_i|² − Σ |u_i|².
    """
    unit = F.normalize(hidden, dim=2, eps=1e-8) * mask[:, :, None]
    count = mask.sum(1)
    return (unit.sum(1).square().sum(1) - unit.square().sum((1, 2))) / (count * (count - 1))


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def evaluate(model, dev, args):
    """Held-out losses, accuracy of the contrast in percent, and the token similarity of each layer; 0 is the word embeddings."""
    model.eval()
    rows, sentences = dev
    weights = 1 / max(1, sum(int(chosen.sum()) for *_, chosen in rows)), 1 / len(rows)
    totals, layers = Counter(), []
    for i in tqdm(range(0, len(rows), 32), desc="dev", disable=None, leave=False):
        for part in make_batch(rows[i : i + 32], model, args):
            totals.update({name: value.item() for name, value in compute_loss(model, (part, *weights), args)[1].items()})
    for i in range(0, len(sentences), 64):
        for ids, _, segments, real, inner, _ in make_batch(sentences[i : i + 64], model, args):
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
                states = read(model.encoder, ids, segments, real).hidden_states
            layers.append(torch.stack([token_similarity(hidden.float(), inner) for hidden in states]))
    model.train()
    return dict(totals) | {"similarity": torch.cat(layers, 1).nanmean(1).tolist()}


def summary(scores):
    """What evaluate found, in a line; empty where nothing was to be read."""
    if "mlm" not in scores:
        return ""
    losses = ", ".join(f"{name} {scores[name]:.4f}" for name in ("mlm", "nsp", "contrast"))
    layers = " ".join(f"{value:.3f}" for value in scores["similarity"])
    return f"{losses}, accuracy {scores['accuracy']:.2f} %, token similarity by layer {layers}"


# ── plumbing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tokenise(sentences, model, longest):
    """([int32 ids (L,)], how many were cut): each sentence alone, with special tokens and without padding."""
    tokenizer, rows, cut = model.tokenizer.backend_tokenizer, [], 0
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest, direction=model.tokenizer.truncation_side)
    for start in range(0, len(sentences), 10_000):             # a million at once would hold tens of gigabytes
        encoded = tokenizer.encode_batch_fast(sentences[start : start + 10_000])
        rows += [np.array(encoding.ids, np.int32) for encoding in encoded]
        cut += sum(bool(encoding.overflowing) for encoding in encoded)
    return rows, cut


def start(args):
    """Rank, world and device; refuses an --out that cannot be, or must not be, written."""
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    args.precision = args.precision or ("fp32" if args.device == "cpu" else "bf16")
    args.rows, args.fingerprint = args.batch_size, fingerprint(Path(args.data))
    if args.batch_size < args.world:
        fail(f"--batch-size {args.batch_size} is less than a row for each of {args.world} processes")
    out = Path(args.out).absolute()
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fail(f"--out {args.out}: {existing} is no folder that can be written")
    if args.resume and not (out / "state.pt").is_file():
        fail(f"--out {args.out}: no state.pt to resume from")
    if not args.resume and existing == out and any(out.iterdir()):
        kept = "another run: continue it with --resume" if (out / "state.pt").is_file() else "files but no checkpoint: empty it"
        fail(f"--out {args.out} holds {kept}, or name another folder")
    if "RANK" in os.environ:
        if args.device != "cpu":
            torch.cuda.set_device(args.device)
        timeout = datetime.timedelta(minutes=30)               # rank 0 evaluates alone meanwhile
        dist.init_process_group("gloo" if args.device == "cpu" else "nccl", timeout=timeout)
    if args.device != "cpu" and args.precision == "bf16":             # tensor cores also for what autocast leaves in float32
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    try:                                                       # before anything is read or written
        similarity_lse(torch.zeros(1, 16, device=args.device), impl=args.impl)
    except ValueError as error:
        fail(f"--{error}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def fingerprint(path):
    """Tells whether data changed between runs: of a file its size and up to 256 places in it, of a folder its names and sizes."""
    digest, size = hashlib.sha1(), path.stat().st_size
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digest.update("".join(f"{file.relative_to(path)} {file.stat().st_size}\n" for file in files).encode())
    else:
        digest.update(str(size).encode())
        with open(path, "rb") as file:
            for place in range(0, size, max(2**16, size // 256)):
                file.seek(place)
                digest.update(file.read(2**16))
    return digest.hexdigest()


def begin_out(args):
    """The folder of a new run, with its flags and the code that ran."""
    if args.resume or args.rank:
        return
    flags = {name: value for name, value in vars(args).items() if name not in ("resume", "out", "rank", "rows", "device")}
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "args.json").write_text(json.dumps(flags, indent=1))
        shutil.copy(__file__, args.out)
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror}")


def average_gradients(model, args):
    """The mean over ranks; with gather_rows it is the gradient of the mean loss over the global batch."""
    if args.world > 1:
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= args.world


SIGNALS = []                                                   # Ctrl-C and SIGTERM that came during a step


def command(main):
    """main, telling the faults of the machine in one line; during training Ctrl-C and SIGTERM wait for the end of a step."""
    @functools.wraps(main)
    def run(argv=None):
        kept = "; a checkpoint that --out holds is whole, and --resume continues from it"
        handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            main(argv)
        except KeyboardInterrupt:                              # asked_to_stop takes it from then on
            say("stopped", "before the first step")
            sys.exit(130)
        except torch.OutOfMemoryError:
            flags = [flag for flag in ("--chunk-size", "--batch-size", "--max-length") if flag in make_parser().format_usage()]
            fail(f"the GPU's memory is full; lower {' or '.join(flags)}{kept}", every_rank=True)
        except (OSError, SafetensorError) as error:
            fail(f"{getattr(error, 'strerror', None) or error}" + kept, every_rank=True)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):         # what torch.save makes of a full disk
                fail(f"{error.__context__.strerror}{kept}", every_rank=True)
            if not dist.is_initialized() or not re.search("gloo|NCCL|[Cc]onnection|[Tt]imed? ?out", str(error)):
                raise
            fail(f"another process of this run has died or hangs ({str(error).splitlines()[0][:80]})" + kept, every_rank=True)
        finally:
            SIGNALS.clear()
            for kind, handler in handlers.items():
                signal.signal(kind, handler)
    return run


def asked_to_stop(step, args):
    """Whether Ctrl-C or SIGTERM came on any rank. Ranks agree every tenth step; a second signal ends the run at once."""
    def heard(number, _):
        if SIGNALS:
            sys.exit(128 + number)
        SIGNALS.append(number)
        if args.rank == 0:                                     # print is not reentrant
            os.write(1, b"\n" * sys.stdout.isatty() + b"stopping when this step is done and saved; once more, and at once\n")

    if step == 0:
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, heard)
    if args.world == 1 or step % 10:
        return bool(SIGNALS) and args.world == 1
    asked = torch.tensor(float(bool(SIGNALS)), device=args.device)
    dist.all_reduce(asked)
    return asked.item() > 0


def refuse_bad_loss(first_bad, where, progress, args):
    """Ends the run if a loss was not finite: at which step, where in the data (a text for a step), and what is left."""
    if args.world > 1:
        dist.all_reduce(first_bad, dist.ReduceOp.MAX)
    if step := int(first_bad):
        left = f"the checkpoint of step {progress['step']} in {args.out} is whole" if progress["step"] else "there is no checkpoint yet"
        fail(f"step {step}: the loss is not finite; {where(step)} of --data; {left}; try a lower --lr")


def report(step, total, values, began, args):
    """A row of metrics.jsonl, and a bar on a terminal or a line in a log. Tensors become means over the ranks."""
    for name in values:
        if torch.is_tensor(values[name]):
            if args.world > 1:
                dist.all_reduce(values[name])
            values[name] = values[name].item() / args.world
    if args.rank == 0:
        first, clock = began
        seconds = time.perf_counter() - clock
        with open(Path(args.out) / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **values, "seconds": round(seconds, 3)}) + "\n")
        left, done = round(seconds / (step - first) * (total - step)), 16 * step // total
        line = (f"{step:7,}/{total:,} {'━' * done}{'─' * (16 - done)}  loss {values['loss']:.4f}  lr {values['lr']:.1e}  "
                f"{(step - first) * args.batch_size / seconds:,.0f} rows/s  left {left // 60}:{left % 60:02}")
        for score in (values[name] for name in ("dev_spearman", "dev_knn") if name in values):
            line += f"  dev {score:.2f}{' best' if values['best'] else ''}"
        bar = sys.stdout.isatty()
        print(f"\r\x1b[K{line}" if bar else line, end="" if bar and "best" not in values else "\n", flush=True)


def save_model(model, scores, args):
    """The encoder as transformers reads it, without heads and teacher: written aside, then renamed file by file."""
    out, aside = Path(args.out), Path(args.out) / ".saving"
    shutil.rmtree(aside, ignore_errors=True)
    model.encoder.save_pretrained(aside)
    tokenizer = copy.deepcopy(model.tokenizer)                 # the original may be at work in stream's thread
    tokenizer.backend_tokenizer.no_truncation()                # tokenise's, which would be saved
    tokenizer.save_pretrained(aside)
    (aside / "README.md").write_text(f"""---
library_name: transformers
pipeline_tag: feature-extraction
---
# {out.name}
An encoder to fine-tune, trained by {Path(__file__).name} from {args.model} on {Path(args.data).name}, {scores["step"]:,} steps.
{summary(scores)}
Every setting is in args.json, the course of the training in metrics.jsonl.

    AutoModel.from_pretrained("{args.out}")
""", encoding="utf-8")
    for file in [path for path in aside.rglob("*") if path.is_file()]:
        os.replace(file, out / file.relative_to(aside))
    shutil.rmtree(aside)


def load_best(model, args):
    """Puts the saved checkpoint back into the encoder."""
    model.encoder.load_state_dict(load_file(Path(args.out) / "model.safetensors"))


def save_state(model, optimizer, progress, args):
    """All that the next step depends on, the random numbers of every rank included: written aside, then renamed."""
    cuda = model.device.type == "cuda"
    random = [[torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None]] * args.world
    if args.world > 1:
        dist.all_gather_object(random, random[0])
    if args.rank == 0:
        state = dict(progress=progress, random=random, model=model.state_dict(), optimizer=optimizer.state_dict())
        with open(Path(args.out) / "state.tmp", "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())                            # whole on the disk before it takes the old one's place
        os.replace(Path(args.out) / "state.tmp", Path(args.out) / "state.pt")


def load_state(model, optimizer, args):
    """Continues the run in --out: its progress; metrics of later steps are dropped, other flags than it had refused."""
    out = Path(args.out)
    try:
        for name, value in json.loads((out / "args.json").read_text()).items():
            if getattr(args, name, None) != value:
                what = "the content of --data, by its checksum," if name == "fingerprint" else name
                fail(f"--resume: {what} was {value} in {out}, now it is {getattr(args, name, None)}")
        state = torch.load(out / "state.pt", map_location=model.device, weights_only=True)
        if state["progress"]["best"]:
            load_best(model, args)                             # would be missed at the end only
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"][args.rank][0].cpu())
        if model.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"][args.rank][1].cpu())
        rows = [row for row in open(out / "metrics.jsonl") if row.endswith("\n") and json.loads(row)["step"] <= state["progress"]["step"]]
    except Exception as error:                                 # a damaged file has many ways to fail
        fail(f"--resume: {out} holds a damaged state.pt, model, args.json or metrics.jsonl ({type(error).__name__})")
    if args.rank == 0:
        (out / "metrics.jsonl").write_text("".join(rows))
    return state["progress"]


def peak_gb(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:                                        # Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def at_least(least, kind=float):
    """An argparse type: a finite number from least up."""
    def convert(text):
        value = kind(text)
        if not least <= value < 2**63:                         # no infinity, no NaN, no seed too long for PyTorch
            raise argparse.ArgumentTypeError(f"{text}: wanted a number of at least {least}")
        return value
    convert.__name__ = kind.__name__                           # argparse names it where the text is no number
    return convert


def say(label, text):
    if os.environ.get("RANK", "0") == "0":
        print("\r\x1b[K" * sys.stdout.isatty() + f"{label:<8} {text}", flush=True)          # in the place of a bar


def fail(message, every_rank=False):
    """Ends the run with one line for the person who started it; mostly the ranks of a run find the same fault."""
    if every_rank or os.environ.get("RANK", "0") == "0":
        print("\r\x1b[K" * sys.stderr.isatty() + f"{Path(__file__).name}: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():                                  # with another rank gone, a group makes an ordinary exit abort now and then
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)


# ── main ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@command
def main(argv=None):
    args = make_parser().parse_args(argv)
    documents = load_data(args.data, args)
    held_out = load_data(args.dev, args) if args.dev else 0
    start(args)
    model = build_model(args)
    dev = load_dev(args.dev, held_out, model, args) if args.dev else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.0, fused=True)
    torch.manual_seed(args.seed + args.rank)                   # ranks have equal weights and different dropout
    fresh = f", fresh heads (not in the checkpoint): {', '.join(model.fresh)}" if model.fresh else ""
    size = sum(p.numel() for p in model.encoder.parameters()) / 1e6
    say("model", f"{args.model}, {size:.1f} M parameters{fresh}; teacher {args.teacher or 'the same, frozen'}")
    say("run", f"seed {args.seed}, {args.world} × {model.device.type}, {args.precision}, "
               f"kernels {choose_impl(args.impl, torch.empty(0, device=model.device))}, "
               f"{args.steps:,} steps of {args.batch_size}, {args.form}'s form, writing {args.out}")

    begin_out(args)
    progress = {"step": 0, "place": [0, 0, 0], "before": None, "best": None}
    if args.resume:
        progress = load_state(model, optimizer, args)
    elif args.rank == 0:
        progress["before"] = evaluate(model, dev, args) if dev else None
    if dev and args.rank == 0:
        say("before", summary(progress["before"]))
    model.train()
    asked_to_stop(0, args)
    began, first_bad = (progress["step"], time.perf_counter()), torch.zeros((), dtype=torch.int64, device=model.device)
    total = args.steps
    pairs, rise = stream(documents, progress["place"], model, args), max(1, total // 10)
    for step in range(progress["step"] + 1, total + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(step / rise, (total - step + 1) / (total - rise + 1))        # warm-up, linear decay (paper)
        batch, places = zip(*itertools.islice(pairs, args.batch_size))
        rng = random.Random(f"{args.seed} masks {step}")
        rows = [(*pair, *choose_and_mask(pair[0], model, args, rng)) for pair in batch]
        tokens = max(1, sum(int(chosen.sum()) for *_, chosen in rows))                       # of all ranks
        values = Counter()
        optimizer.zero_grad()
        for part in make_batch(rows[own_rows(args.rows)], model, args):
            loss, terms = compute_loss(model, (part, args.world / tokens, args.world / args.batch_size), args)
            loss.backward()
            values.update(terms)
        average_gradients(model, args)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        values = dict(values) | {"lr": optimizer.param_groups[0]["lr"]}
        first_bad = torch.where((first_bad == 0) & ~values["loss"].isfinite(), step, first_bad)
        stop, due = asked_to_stop(step, args), step % args.eval_every == 0 or step == total
        shown = due or stop or step % (1 + total // 40) == 0
        if shown:
            refuse_bad_loss(first_bad, lambda _: f"pairs up to byte {places[-1][0]:,}", progress, args)
        if due and args.rank == 0:
            scores = evaluate(model, dev, args) if dev else {}
            values |= {f"dev_{name}": value for name, value in scores.items()} | {"best": True}
            progress["best"] = {"step": step, **scores}        # the last one is kept: nothing is chosen (paper)
            save_model(model, progress["best"], args)
        if shown:
            report(step, total, values, began, args)
        if due or stop:
            progress |= {"step": step, "place": places[-1]}
            save_state(model, optimizer, progress, args)
        if stop:
            say("stopped", f"at step {step}, saved; --resume continues")
            sys.exit(130)

    if args.rank == 0:
        minutes, seconds = divmod(round(time.perf_counter() - began[1]), 60)
        before, after, change = progress["before"], progress["best"], ""
        if dev:
            say("after", summary(after))
            change = (f"contrast accuracy {before['accuracy']:.2f} → {after['accuracy']:.2f} %, "
                      f"token similarity of the top layer {before['similarity'][-1]:.3f} → {after['similarity'][-1]:.3f}, ")
        say("done", f"{change}{minutes} min {seconds} s, peak {peak_gb(model.device):.1f} GB")
        say("load", f'AutoModel.from_pretrained("{args.out}")')
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
