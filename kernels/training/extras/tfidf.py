"""Change unimportant words of a text, guided by TF-IDF, as CIL (Chen et al. 2021) does."""
import itertools
import math
import re
from collections import Counter

WORD = re.compile(r"\w\w+")                    # what counts as a word, and what an edit may change


class WordEditor:
    """Changes words of a text, guided by the TF-IDF of the words in all `texts`.

    A word that occurs n times in L texts has idf log(L / n), and in a text of k words the TF-IDF idf / k.

    insert     whether a change is, with equal probability, a substitution or a new word before the old one
    keep_all   whether to keep what is not a word: punctuation, single letters
    """

    def __init__(self, texts, insert=True, keep_all=True):
        self.insert, self.keep_all, texts = insert, keep_all, [WORD.findall(text) for text in texts]
        self.count, self.occurrences = len(texts), Counter(itertools.chain(*texts))
        totals = Counter()                     # each word's TF-IDF, summed over all texts
        for words in texts:
            totals.update({word: n * self.idf(word) / len(words) for word, n in Counter(words).items()})
        self.vocabulary, most = [*totals], max(totals.values(), default=0)
        # new words: in proportion to the distance from the largest total; 1e-9, so that not all are 0
        self.cumulative = [*itertools.accumulate(most - total + 1e-9 for total in totals.values())]

    def idf(self, word):
        """Return the inverse document frequency; an unknown word counts as one that occurs once."""
        return math.log(self.count / (self.occurrences[word] or 1))

    def edit(self, text, rng):
        """Return the text with 30 % of its words changed, at least 1 and at most 10, mostly common words.

        rng    random.Random
        """
        words = WORD.findall(text)
        if not words:
            return text
        count = min(max(int(0.3 * len(words)), 1), 10)
        values = [self.idf(word) / len(words) for word in words]
        gaps = [max(values) - value for value in values]
        # draw places without repetition, in proportion to the gaps; those with gap 0 follow in random order
        keys = [(1, math.log(1 - rng.random()) / gap) if gap > 0 else (0, rng.random()) for gap in gaps]
        chosen = sorted(range(len(words)), key=keys.__getitem__)[len(words) - count :]
        for i, new in zip(chosen, rng.choices(self.vocabulary, cum_weights=self.cumulative, k=count)):
            inserted = self.insert and rng.random() < 0.5
            words[i] = f"{new} {words[i]}" if inserted else new
        if not self.keep_all:
            return " ".join(words)
        changed = iter(words)
        return WORD.sub(lambda _: next(changed), text)
