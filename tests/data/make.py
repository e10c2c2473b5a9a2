"""Write the small data sets in this folder. All sentences are generated from the tables below and all images
are drawn by this file; nothing is copied from a data set. The output is the same, byte for byte, every time:

    python tests/data/make.py [folder]

nli.csv        600 triplets sent0,sent1,hard_neg: a premise, a sentence it entails, a sentence it contradicts
sentences.txt  600 plain sentences of 6 to 25 words, one per line
sts.tsv        300 pairs sentence1, sentence2, score from 0 (nothing in common) to 5 (same meaning), and a
               subset, indoors or outdoors
entities.tsv   320 sentences, each with an entity that it mentions, three other entities of its type from other
               pages, the type and the page
wordnet        the words of sentences.txt in the format of Princeton's database: data.* (synsets) and *.exc
               (irregular forms)
relations.jsonl      40 bags, each of one to eight sentences about two people: 32 bags have one of four relations, 8
               have none (NA). Four in ten sentences with a relation do not express it.
               relations_dev.jsonl has 40 bags of other pairs
topics.tsv     320 sentences with one of eight topics: sentence, label; topics_dev.tsv has 120 others
shapes.npz     600 training and 300 test images of 16 px: discs, rings, squares, triangles, crosses, stripes

A meaning consists of four choices (who, act, where, time), and each choice has several wordings. Sentences with
the same meaning may share few words, and sentences with different meanings many, so that counting words is not
enough.
"""
import csv
import itertools
import json
import random
import re
import sys
from pathlib import Path

import numpy as np

# Six lines per domain: who, where, and four acts, each # its opposite. ";" separates choices, "/" wordings. The first four domains are indoors.
WORLD = """
kitchen: the chef / the head cook; the baker / the bread maker; two waiters / a pair of waiters; the apprentice / the kitchen boy
in the hotel kitchen / behind the hotel restaurant; in the café / at the coffee house; on board the ferry / aboard the ship
peeled the potatoes / took the skins off the potatoes / the potatoes were peeled by WHO # boiled the potatoes in their skins
burned the onion soup / left the soup on the fire too long / the onion soup was burned by WHO # served a perfect onion soup
shouted "Order up!" / called out that the meal was ready # said nothing about the order / kept quiet about the meal
baked a lemon cake / made a cake with citrus fruit / a lemon cake was baked by WHO # threw a lemon cake away / binned the cake
office: the manager / the team head; the accountant / the bookkeeper; three interns / a trio of trainees; the clerk / the helper
on the top floor / high up in the tower; in the meeting room / around the conference table; at the bank / inside the bank building
signed the contract / agreed in writing / the contract was signed by WHO # would not sign the contract / rejected the terms
sent the report / mailed off the written results / the report was sent by WHO # deleted the report / erased the written results
asked for a raise / wanted a higher salary # turned down a raise / did not want a higher salary
said "We open today" / announced that business would begin # said "We stay closed" / announced that there would be no business
music: the pianist / the keyboard player; the singer / the vocalist; the choir / the chorus; four violinists / a string quartet
in the concert hall / on the big stage; in the old church / under the chapel roof; at the studio / between the microphones
played a waltz / performed a dance tune / a waltz was played by WHO # skipped the waltz / left out the dance tune
forgot the last verse / could not remember how the song ended # knew the last verse / remembered how the song ended
recorded an album / put fresh songs on tape / an album was recorded by WHO # cancelled an album / shelved some fresh songs
delighted the audience / pleased the listeners / the audience was delighted by WHO # bored the audience / made listeners yawn
home: the grandmother / the old lady; the father / the dad; the twins / the two sisters; the guest / the visitor
in the living room / in the lounge; in the attic / right under the roof; in the cellar / down in the basement
painted the chair red / made the seat scarlet / the chair was painted red by WHO # left the chair unpainted / left the seat plain
fell asleep / drifted off into a nap # stayed awake / did not sleep a wink
wrapped the present / put the gift in paper / the present was wrapped by WHO # unwrapped the present / tore the paper off the gift
won the chess game / beat everybody at chess # lost the chess game / was beaten at chess
weather: the storm / the violent gale; the rain / the downpour; the snow / the snowfall; the fog / the thick mist
in the village / around the cottages; along the coast / near the seashore; in the mountains / up on the peaks
stopped all traffic / brought every car to a halt / all traffic was stopped by WHO # left the traffic alone / held up no cars
grew heavier / became more intense # grew lighter / became less intense
lasted for hours / went on and on # ended within minutes / was soon over
pleased the children / made little ones cheer / the children were pleased by WHO # upset the children / made little ones cry
animals: the old dog / the grey-muzzled hound; the cat / the kitten; two ponies / a couple of horses; the fox / the red hunter
in the park / on the public lawn; by the river / on the bank of the stream; behind the barn / at the back of the stable
chased the ball / ran after the toy / the ball was chased by WHO # ignored the ball / paid no attention to the toy
ate the apples / swallowed the fruit / the apples were eaten by WHO # left the apples untouched / would not touch the fruit
slept like a stone / dozed without a break # kept both eyes open / stayed fully alert
jumped over the fence / leapt across the wooden rails # crawled under the fence / squeezed below the wooden rails
football: the captain / the team leader; the goalkeeper / the woman in goal; the referee / the official; the players / the team
in the stadium / in front of the stands; on the training ground / on the practice field; in the yard / between the houses
kicked the ball away / sent the ball flying / the ball was kicked away by WHO # held on to the ball / kept the ball close
shook hands with the fans / greeted the supporters # walked past the fans / avoided the supporters
drank some water / took a few sips from a bottle # went thirsty / drank nothing at all
started the match / got the game going / the match was started by WHO # called off the match / decided there would be no game
travel: the conductor / the ticket inspector; the tourists / sightseers; the cyclist / the bike rider; five hikers / five walkers
at the station / beside the platform; at the border / near the frontier post; in the harbour / by the moored boats
took a wrong turn / went the wrong way # took the right road / went the correct way
missed the bus / came too late for the coach / the bus was missed by WHO # caught the bus / got to the coach on time
bought a map / paid for a street plan / a map was bought by WHO # sold a map / parted with a street plan
photographed the bridge / took pictures of the crossing # took no pictures of the bridge / aimed no camera at the crossing
"""
WHEN = """at dawn / as the sun came up / just when day was breaking; at noon / in the middle of the day / at twelve o'clock
late at night / close to midnight / when most people were in bed; an hour ago / sixty minutes ago; two weeks ago / a fortnight ago
on New Year's Day / on the first of January; last spring / when flowers came out; during the holidays / in the school break"""
LEADS = "According to Zoë, ", "Søren saw that ", "As Łukasz tells it, ", "Chloé says that ", "Jürgen heard that ", "İpek wrote that "
WHO, ACT, WHERE, TIME, OPPOSITE = range(5)
CHANGED = {5.0: (), 4.4: (), 4.0: (TIME,), 3.6: (WHO,), 2.4: (OPPOSITE,), 1.6: (ACT, TIME), 0.8: (WHO, ACT, WHERE, TIME), 0.0: ()}
rng, seen, DOMAINS, TOPICS = random.Random(10), set(), [], []
for who, where, *acts in zip(*[iter(WORLD.strip().split("\n"))] * 6):
    TOPICS.append(who.split(": ")[0])
    lines = who.split(": ")[1], "; ".join(acts), where, WHEN.replace("\n", "; ")
    DOMAINS.append([[choice.split(" / ") for choice in line.replace(" # ", "; ").split("; ")] for line in lines])
SUBSETS = {"indoors": DOMAINS[:4], "outdoors": DOMAINS[4:]}


def pick(options):  # rng.random alone is promised to repeat in every Python version
    return options[int(rng.random() * len(options))]


def draw(domains):
    domain = pick(domains)
    return domain, [pick(range(len(choices))) for choices in domain], [pick(range(6)) for _ in domain]


def change(domain, meaning, *slots):
    new = list(meaning)
    for s in slots:
        if s == OPPOSITE:
            new[ACT] ^= 1  # acts 2i and 2i + 1 are opposites
        else:
            new[s] = pick([i for i in range(len(domain[s])) if i != new[s] and (s != ACT or i != new[s] ^ 1)])
    return new


def say(domain, meaning, words, reword=0.0, drop=None, lead="", front=None):
    words = [(w + pick((1, 5))) % 6 if rng.random() < reword else w for w in words]  # another wording
    who, act, where, when = (choices[m][w % len(choices[m])] for choices, m, w in zip(domain, meaning, words))
    text = lead + (act.replace("WHO", who) if "WHO" in act else f"{who} {act}")
    front = pick((WHO, WHERE, TIME)) if front is None else front
    for slot, place in (WHERE, where), (TIME, when):
        if slot != drop:
            text = f"{place}, {text}" if slot == front else f"{text} {place}"
    return text[0].upper() + text[1:] + ("" if text.endswith(('!"', '?"')) else ".")


def triple(domains):
    case = domain, meaning, words = draw(domains)
    lead = pick(LEADS) if rng.random() < 0.2 else ""
    against = change(domain, meaning, pick((WHO, WHERE, TIME, OPPOSITE, OPPOSITE, OPPOSITE)))
    premise = say(*case, lead=lead, front=WHO if lead else None)
    return premise, say(*case, 0.8, pick((None, None, WHERE, TIME))), say(domain, against, words, 0.4)


def sentence(domains):
    case = domain, meaning, words = draw(domains)
    drop = pick((WHERE, TIME))  # the first clause has one of the two, the second the other
    one, two = say(*case, drop=drop), say(domain, change(domain, meaning, WHO, ACT), words, 0.0, WHERE + TIME - drop, front=WHO)
    return (pick((one, f"{one.rstrip('.')}, {pick(('and', 'while'))} {two[0].lower()}{two[1:]}")),)


def pair(domains, score):
    case = domain, meaning, words = draw(domains)
    if score == 0.0:
        domain, meaning, words = draw([d for d in DOMAINS if d is not domain])
    return say(*case), say(domain, change(domain, meaning, *CHANGED[score]), words, 0.7, TIME if score == 4.4 else None)


def topic(i):
    domain = DOMAINS[i]
    meaning, words = [pick(range(len(choices))) for choices in domain], [pick(range(6)) for _ in domain]
    return say(domain, meaning, words, drop=pick((None, WHERE, TIME))), TOPICS[i]


def fresh(make, *args):  # no sentence occurs twice, in one file or in two
    while True:
        row = make(*args)
        if len({*row} - seen) == len(row) and all(6 <= len(text.split()) <= 25 for text in row):
            seen.update(row)
            return row


def linked(domains):
    """Return a sentence, an entity that it mentions, other entities of its type from other pages, the type, and the page."""
    while True:
        case = domain, meaning, _ = draw(domains)
        text, slot = say(*case), pick((WHO, ACT, WHERE))
        if text not in seen and 6 <= len(text.split()) <= 25:
            break
    seen.add(text)

    def title(domain, choice):
        name = domain[slot][choice][0]
        return name[0].upper() + name[1:]

    others, negatives = [other for other in DOMAINS if other is not domain], []
    for _ in range(3):
        negatives.append(title(other := pick(others), pick(range(len(other[slot])))))
        others.remove(other)
    page = WORLD.strip().split("\n")[6 * DOMAINS.index(domain)].split(":")[0].capitalize()
    return text, title(domain, meaning[slot]), "|".join(negatives), ("person", "deed", "place")[slot], page


# A synset: its words, then "<" a word of its hypernym's synset, and "!" the antonym of its first word.
SYNSETS = dict(noun="""thing; person individual < thing; worker < person; cook chef < worker; head_cook < chef; baker bread_maker < worker
waiter < worker; apprentice learner < person; boy male_child < person ! girl; girl < person; manager team_head < worker; clerk < worker
accountant bookkeeper < worker; intern trainee < worker; helper assistant < person; musician < person; pianist keyboard_player < musician
singer vocalist < musician; choir chorus < group; group < thing; woman lady < person ! man; man < person; father dad < parent ! mother
mother < parent; parent < person; sister < woman; twin < person; guest visitor < person ! host; host < person; child kid < person ! adult
adult < person; captain < worker; player < person; fan supporter < person; tourist sightseer < traveller; traveller < person
place < thing; kitchen < room; room < place; hotel < building; building < place; café coffee_house < building; tower < building
church chapel < building; station < place; stadium < place; village < place; coast seashore < place; mountain peak < place ! valley
valley < place; park < place; river stream < water; water < thing; barn stable < building; border frontier < place; harbour < place
attic < room ! cellar; cellar basement < room ! attic; roof < thing; floor < thing; food < thing; potato < food; soup < food; cake < food
apple < fruit; fruit < food; meal < food; contract agreement < paper; paper < thing; report account < paper; raise < thing; salary < thing
song < thing; waltz < dance; dance < thing; album record < thing; verse line < thing; present gift < thing; chair seat < thing; nap < sleep
sleep < thing; game match < thing; storm gale < weather; weather < thing; rain downpour < weather; snow snowfall < weather; fog mist < weather
traffic < thing; car < vehicle; vehicle < thing; bus coach < vehicle; ferry < ship; ship < vehicle; dog hound < animal; animal < thing
cat kitten < animal; pony < horse; horse < animal; fox < animal; ball < toy; toy < thing; fence rail < thing; map plan < paper
bridge crossing < thing; day < time ! night; night < time ! day; time < thing; dawn < time ! dusk; dusk < time; noon twelve < time ! midnight
midnight < time ! noon; hour < time; week < time; spring < time ! autumn; autumn < time; holiday < time; skin peel < thing""",
verb="""act; peel < act; burn < cook; cook < act; boil < cook; bake < cook; leave < go ! arrive; arrive < come; come < go; go move < act
serve < act; shout call < say; say tell < act; throw < move; sign < write; write < act; agree < say ! refuse; refuse reject < say ! agree
send mail < give ! receive; receive get < act ! send; give < act ! take; take < act ! give; ask < say ! answer; answer < say
want wish < act; delete erase < act ! write; play perform < act; forget < act ! remember; remember < act ! forget; record < act
delight please < act ! bore; bore < act ! delight; skip < act; cancel < act; know < act; paint < act; fall < move ! rise; rise < move
wrap < act ! unwrap; unwrap < act ! wrap; win < act ! lose; lose < act ! win; beat < act; stop halt < act ! start; start begin < act ! stop
bring < give; grow become < act ! shrink; shrink < act; last < act; end finish < act ! begin; chase follow < move ! lead; lead < move
run < move ! walk; walk < move; eat swallow < act; doze < act; jump leap < move ! crawl; crawl < move; ignore < act ! notice; notice see < act
pay < give; kick < act; greet < act ! avoid; avoid < act ! greet; drink < act; miss < lose ! catch; catch < take ! miss; buy < get ! sell
sell < give ! buy; photograph < record; make < act ! break; break < act; stay < act ! change; change < act; keep hold < act ! lose""",
adj="""red scarlet; old aged ! young; young ! old; new fresh ! old; living alive ! dead; dead ! living; late ! early; early ! late
wrong incorrect ! right; right correct ! wrong; perfect ! bad; bad ! good; good ! bad; heavy ! light; light ! heavy; intense strong ! weak
weak ! strong; alert awake ! asleep; asleep ! awake; big large ! small; small little ! big; thick ! thin; thin ! thick; asleep(p) ! awake
close near ! far; far ! near; high ! low; low ! high; written ! unwritten; unwritten ! written; first ! last; last ! first""",
adv="""late ! early; early ! late; soon shortly; away off; down ! up; up ! down; together ! apart; apart ! together; again once_more; fully""")
IRREGULAR = dict(noun="men man, women woman, children child, potatoes potato", adj="better good, best good, worse bad, worst bad", adv="",
verb="""left leave, threw throw, thrown throw, wrote write, written write, sent send, gave give, given give, took take, taken take, said say
told tell, forgot forget, forgotten forget, knew know, known know, fell fall, fallen fall, won win, lost lose, beaten beat, began begin
begun begin, brought bring, grew grow, grown grow, became become, went go, gone go, led lead, ran run, ate eat, eaten eat, slept sleep
leapt leap, saw see, seen see, paid pay, drank drink, drunk drink, caught catch, bought buy, sold sell, got get, made make, broke break
broken break, kept keep, held hold, cancelled cancel, stopped stop, stopping stop, skipped skip, wrapped wrap, winning win, running run""")


def synset_lines(pos, entries, places):
    """Yield the lines of data.<pos>. places: byte offsets of the entries."""
    words_of = [re.findall(r"\S+", re.split("[<!]", entry)[0]) for entry in entries]
    first = {word: (i, n) for i, words in reversed([*enumerate(words_of)]) for n, word in enumerate(words, 1)}
    letter = dict(noun="n", verb="v", adj="a", adv="r")[pos]
    yield "  1 Written for these tests. Nothing here is from Princeton's database, only the format is.\n"
    for entry, words, place in zip(entries, words_of, places):
        targets = [(symbol, *first[word]) for symbol, word in re.findall(r"([<!]) (\S+)", entry)]
        pointers = [f"@ {places[i]:08} {letter} 0000 " if symbol == "<" else f"! {places[i]:08} {letter} 01{n:02x} " for symbol, i, n in targets]
        pairs, frames = "".join(f"{word} 0 " for word in words), "00 " if pos == "verb" else ""
        yield f"{place:08} 00 {letter} {len(words):02x} {pairs}{len(pointers):03} {''.join(pointers)}{frames}| {' or '.join(words)}  \n"


def write_wordnet(folder):
    folder.mkdir(exist_ok=True)
    for pos, text in SYNSETS.items():
        entries = text.replace("\n", "; ").split("; ")
        lengths = [len(line.encode()) for line in synset_lines(pos, entries, [0] * len(entries))]
        places = list(itertools.accumulate(lengths))
        Path(folder, f"data.{pos}").write_bytes("".join(synset_lines(pos, entries, places)).encode())
        forms = filter(None, IRREGULAR[pos].replace("\n", ", ").split(", "))
        Path(folder, f"{pos}.exc").write_bytes("".join(f"{pair}\n" for pair in sorted(forms)).encode())


GRID = (np.arange(16) + 0.5) / 8 - 1  # pixel centres, from −1 to 1
SHAPES = [lambda x, y: np.hypot(x, y) - 0.9, lambda x, y: abs(np.hypot(x, y) - 0.7) - 0.25,
          lambda x, y: np.maximum(abs(x), abs(y)) - 0.75, lambda x, y: np.maximum(abs(x) * 0.87 + y * 0.5, -y) - 0.5,
          lambda x, y: np.minimum(np.maximum(abs(x) - 0.3, abs(y) - 1), np.maximum(abs(y) - 0.3, abs(x) - 1)),
          lambda x, y: np.maximum(abs((x * 1.8) % 1 - 0.5) / 1.8 - 0.14, np.hypot(x, y) - 1.1)]  # distances from the edge


def draw_shape(shape):
    """Return an image (16, 16, 3): the shape at a random position, size, angle and colour on a background of another colour."""
    turn, size = 6.283 * rng.random(), 0.45 + 0.3 * rng.random()
    x, y = ((GRID - (rng.random() - 0.5) * (1 - size)) / size for _ in range(2))
    x, y = x[None] * np.cos(turn) - y[:, None] * np.sin(turn), x[None] * np.sin(turn) + y[:, None] * np.cos(turn)
    cover = np.clip(0.5 - 8 * size * SHAPES[shape](x, y), 0, 1)[:, :, None]
    front, back = ([rng.random() for _ in range(3)] for _ in range(2))
    while sum(abs(a - b) for a, b in zip(front, back)) < 0.8:
        front = [rng.random() for _ in range(3)]
    return np.round(8 * (cover * front + (1 - cover) * back)) * 31  # few colours keep the file small


NAMES = """Ada Bjarne Chidi Dalia Emre Fenna Goran Hana Idris Jonas Kaja Leila Milo Nadia Otto Petra Quentin Rosa Sven Tamar Umut Vera
           Wanda Xaver Yusuf Zita""".split()
RELATIONS = {"parent_of": "H is the mother of T / T is the younger child of H / H raised T in a small town / T has the eyes of H, the proud parent",
             "married_to": "H married T in the old church / the wedding of H and T lasted three days / T became the husband of H / H and T celebrated as a couple",
             "taught": "H taught T chemistry at school / T learned the piano from H / H gave T lessons every week / T was the best student of H",
             "hired": "H hired T as an accountant / T works for the company of H / H pays T a good salary / T signed a contract with the firm of H",
             "NA": "H met T at the station / H and T arrived late / T wrote a letter to H / H saw T on the ferry / T sat behind H in the theatre"}
LATER = "", " last year", " in spring", " long ago", ", the papers say"


def bag(relation, pair):
    """Return the lines of a bag. In a noisy sentence, H and T are mentioned without the relation."""
    lines = []
    for i in range(1 + int(8 * rng.random())):
        words = pick((RELATIONS["NA"] if i and rng.random() < 0.5 else RELATIONS[relation]).split(" / ")) + pick(LATER) + "."
        entities, text = {}, ""
        for part in re.split(r"\b([HT])\b", words):
            if part in ("H", "T"):
                name = pair[part == "T"]
                entities[part.lower()] = dict(id=f"Q{NAMES.index(name)}", name=name, pos=[len(text), len(text) + len(name)])
                part = name
            text += part
        lines.append(dict(text=text[0].upper() + text[1:], relation=relation, h=entities["h"], t=entities["t"]))
    return lines


def main(folder=Path(__file__).parent):
    nli = [fresh(triple, domains) for _ in range(300) for domains in SUBSETS.values()]
    sts = [(*fresh(pair, SUBSETS[name], score), str(score), name) for _ in range(19) for score in CHANGED for name in SUBSETS]
    sentences = [fresh(sentence, domains) for _ in range(300) for domains in SUBSETS.values()]
    with open(Path(folder, "nli.csv"), "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("sent0", "sent1", "hard_neg"), *nli])
    for name, rows in ("sts.tsv", [("sentence1", "sentence2", "score", "subset"), *sts[:300]]), ("sentences.txt", sentences):
        Path(folder, name).write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    write_wordnet(Path(folder, "wordnet"))
    labels = np.arange(900, dtype=np.uint8) % len(SHAPES)
    images = np.stack([draw_shape(label) for label in labels]).astype(np.uint8)
    np.savez_compressed(Path(folder, "shapes.npz"), images=images[:600], labels=labels[:600], test_images=images[600:], test_labels=labels[600:])
    rng.seed(11)                                               # so that the files above can change without changing this one
    entities = [("text", "positive_entity", "negative_entity", "entity_type", "page")] + [linked(DOMAINS) for _ in range(320)]
    Path(folder, "entities.tsv").write_text("".join("\t".join(row) + "\n" for row in entities), encoding="utf-8", newline="\n")
    rng.seed(11)
    topics = list(dict.fromkeys(topic(i % len(TOPICS)) for i in range(480)))
    for name, rows in ("topics.tsv", topics[:320]), ("topics_dev.tsv", topics[320:440]):
        Path(folder, name).write_text("".join("\t".join(row) + "\n" for row in [("sentence", "label"), *rows]), encoding="utf-8", newline="\n")
    rng.seed(11)
    pairs = sorted(itertools.permutations(NAMES, 2), key=lambda _: rng.random())[:80]
    names = [*list(RELATIONS)[:4] * 8, *["NA"] * 8]
    for name, chosen in ("relations.jsonl", pairs[:40]), ("relations_dev.jsonl", pairs[40:]):
        rows = [line for relation, pair in zip(names, chosen) for line in bag(relation, pair)]
        Path(folder, name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
