"""Tasks that need reasoning, with the reasoning spelled out: arithmetic, sorting, letters, small stories.

A task is made from a random generator, so there are as many as wanted. One in fifty questions, chosen by a hash of its
text, is held out: training never sees it, benchmarks and accuracy see nothing else.

  python -m tiny_kimi.tasks --count 400 --out prompts/tiny-kimi-train.jsonl
  python -m tiny_kimi.tasks --count 64 --held-out --out prompts/tiny-kimi-benchmark.jsonl
"""

import argparse
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_HELD_OUT_SHARE = 50  # one in so many
_NAMES, _THINGS, _WORDS = (words.split() for words in (
    "Ada Ben Cleo Dan Eva Finn Gita Hugo Ines Jon Kira Leo Mia Nils Olga Paul Rosa Sam Tina Uma",
    "apples pears coins books cards shells stamps beads pens plums nuts cups keys maps eggs bolts",
    "anchor autumn banana basket beacon border bottle bridge bucket butter button candle canyon carpet castle cellar "
    "cherry circle copper corner cotton cousin dinner dragon eleven engine falcon family farmer feather finger flower "
    "forest garden ginger glider guitar hammer harbor helmet hollow island jacket jungle kettle kitten ladder lantern "
    "lemon letter lizard marble market meadow mirror monkey morning needle oven orange otter paddle palace paper "
    "parrot pebble pencil pepper pillow planet pocket potato puzzle rabbit ribbon river rocket saddle sailor salmon "
    "school shadow silver singer spider spring square stable summer sunset tablet temple thunder ticket timber tomato "
    "tunnel turtle valley velvet village violet walnut window winter yellow zebra zipper",
))


@dataclass(frozen=True)
class Task:
    """A question, how to think about it, and the answer as the reply's content."""

    kind: str
    question: str
    reasoning: str
    answer: str


# --- arithmetic, digit by digit ---------------------------------------------------------------------------


def addition(rng: random.Random) -> Task:
    """Two numbers of up to five digits, added from the right with carries."""
    a, b = _number(rng, 2, 5), _number(rng, 2, 5)
    width = max(len(str(a)), len(str(b)))
    top, bottom = f"{a:0{width}}", f"{b:0{width}}"
    steps, carry = [], 0
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        total = int(x) + int(y) + carry
        terms = f"{x} + {y}" + (f" + {carry}" if carry else "")
        steps.append(f"{terms} = {total}, write {total % 10}" + (f", carry {total // 10}." if total > 9 else "."))
        carry = total // 10
    steps += [f"Write the carry {carry}."] if carry else []
    asked = rng.choice(["What is {} + {}?", "Add {} and {}.", "Please compute {} plus {}."]).format(a, b)
    lined = f"Line up {' '.join(top)} and {' '.join(bottom)}."
    return Task("addition", asked, " ".join([lined, *steps, f"Together {_spaced(a + b)}."]), f"{a} + {b} = {a + b}")


def subtraction(rng: random.Random) -> Task:
    """The smaller of two numbers of up to four digits taken from the larger, with borrowing."""
    b, a = sorted((_number(rng, 2, 4), _number(rng, 2, 4)))
    top, bottom = str(a), f"{b:0{len(str(a))}}"
    steps, borrowed = [], 0
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        have = int(x) - borrowed
        shown = f"{x} - 1 = {have}, " if borrowed else ""
        if have < int(y):
            steps.append(f"{shown}{have} - {y} is too small, borrow, {have + 10} - {y} = {have + 10 - int(y)}.")
        else:
            steps.append(f"{shown}{have} - {y} = {have - int(y)}.")
        borrowed = int(have < int(y))
    asked = rng.choice(["What is {} - {}?", "Take {1} from {0}.", "Please compute {} minus {}."]).format(a, b)
    lined = f"Line up {' '.join(top)} and {' '.join(bottom)}."
    return Task("subtraction", asked, " ".join([lined, *steps, f"Together {_spaced(a - b)}."]), f"{a} - {b} = {a - b}")


def multiplication(rng: random.Random) -> Task:
    """A number of up to four digits times a digit."""
    a, digit = _number(rng, 2, 4), rng.randint(2, 9)
    steps, carry = [], 0
    for x in reversed(str(a)):
        product = int(x) * digit
        total = product + carry
        added = f" + {carry} = {total}" if carry else ""
        steps.append(f"{x} * {digit} = {product}{added}, write {total % 10}, carry {total // 10}.")
        carry = total // 10
    asked = rng.choice(["What is {} * {}?", "Multiply {} by {}.", "Please compute {} times {}."]).format(a, digit)
    thought = " ".join([f"Digits {_spaced(a)}.", *steps, f"Together {_spaced(a * digit)}."])
    return Task("multiplication", asked, thought, f"{a} * {digit} = {a * digit}")


def progression(rng: random.Random) -> Task:
    """The next number of a sequence with a constant step."""
    start, step = rng.randint(1, 60), rng.randint(2, 12)
    shown = [start + step * k for k in range(rng.randint(3, 5))]
    listed, last = ", ".join(map(str, shown)), shown[-1]
    asked = rng.choice(["Which number comes next: {}?", "Continue {}.", "What follows {}?"]).format(listed)
    thought = f"{shown[1]} - {shown[0]} = {step}, so each step adds {step}. {last} + {step} = {last + step}."
    return Task("progression", asked, thought, str(last + step))


# --- lists ------------------------------------------------------------------------------------------------


def sorting(rng: random.Random) -> Task:
    """Up to six numbers in ascending order, the smallest taken out each time."""
    numbers = rng.sample(range(1, 100), rng.randint(3, 6))
    left, steps = list(numbers), []
    while left:
        steps.append(f"Left {' '.join(map(str, left))}, smallest {min(left)}.")
        left.remove(min(left))
    listed = ", ".join(map(str, numbers))
    asked = rng.choice(["Sort {}.", "Put {} in ascending order.", "Please sort these numbers: {}."]).format(listed)
    return Task("sorting", asked, " ".join(steps), ", ".join(map(str, sorted(numbers))))


def largest(rng: random.Random) -> Task:
    """The largest of up to six numbers, compared one after the other."""
    numbers = rng.sample(range(10, 1000), rng.randint(3, 6))
    best, steps = numbers[0], [f"Start with {numbers[0]}."]
    for number in numbers[1:]:
        steps.append(f"{number} is larger, keep {number}." if number > best else f"{number} is smaller, keep {best}.")
        best = max(best, number)
    listed = ", ".join(map(str, numbers))
    asked = rng.choice(["Which is the largest of {}?", "Find the maximum of {}."]).format(listed)
    return Task("largest", asked, " ".join(steps), f"The largest is {best}")


# --- letters ----------------------------------------------------------------------------------------------


def reversal(rng: random.Random) -> Task:
    """A word spelled backwards."""
    word = rng.choice(_WORDS) + rng.choice(["", "", "s"])
    asked = rng.choice(['Spell "{}" backwards.', 'Reverse the word "{}".']).format(word)
    back = list(reversed(word))
    steps = [f"{place} {letter}," for place, letter in enumerate(word, 1)]
    thought = f"Letters: {' '.join(steps)} so {len(word)}. From the end: {' '.join(back)}."
    return Task("reversal", asked, thought, "-".join(back))


def replacement(rng: random.Random) -> Task:
    """Every occurrence of a letter in a word replaced by another one."""
    word = rng.choice(_WORDS) + rng.choice(["", "s"])
    old, new = rng.choice(word), rng.choice("aeioutrk")
    asked = rng.choice(['Replace every {1} in "{0}" with {2}.', 'Change each {1} of "{0}" to {2}.'])
    steps = [f"{letter} becomes {new}," if letter == old else f"{letter} stays," for letter in word]
    edited = [new if letter == old else letter for letter in word]
    thought = f"{' '.join(steps)} so {' '.join(edited)}."
    return Task("replacement", asked.format(word, old, new), thought, "-".join(edited))


def counting(rng: random.Random) -> Task:
    """How often a letter occurs in two words."""
    words = rng.sample(_WORDS, 2)
    letter = rng.choice(words[0])
    asked = rng.choice(['How many times does {0} occur in "{1} {2}"?', 'Count the letter {0} in "{1} {2}".'])
    steps, count = [], 0
    for each in "".join(words):
        count += each == letter
        steps.append(f"{each} {count}," if each == letter else f"{each},")
    asked = asked.format(letter, *words)
    return Task("counting", asked, f"{' '.join(steps)} so {count}.", f"{letter} occurs {count} times")


# --- small stories ----------------------------------------------------------------------------------------


def story(rng: random.Random) -> Task:
    """Somebody's things become more and fewer."""
    name, other = rng.sample(_NAMES, 2)
    things, have = rng.choice(_THINGS), rng.randint(10, 60)
    told, steps = [f"{name} has {have} {things}."], [f"{name} starts with {have}."]
    for _ in range(rng.randint(1, 3)):
        number = rng.randint(2, 30)
        if rng.random() < 0.5 and have > number:
            told.append(f"{name} {rng.choice([f'gives {number} to {other}', f'loses {number}'])}.")
            steps.append(f"Fewer: {have} - {number} = {have - number}.")
            have -= number
        else:
            told.append(f"{name} {rng.choice([f'buys {number} more', f'gets {number} from {other}'])}.")
            steps.append(f"More: {have} + {number} = {have + number}.")
            have += number
    told.append(rng.choice([f"How many {things} does {name} have now?", f"How many {things} are left?"]))
    return Task("story", " ".join(told), " ".join(steps), f"{name} has {have} {things}")


def boxes(rng: random.Random) -> Task:
    """Equal groups, and what is left after some are taken."""
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    count, each = rng.randint(2, 9), rng.randint(2, 12)
    total, used = count * each, rng.randint(1, 2 * each - 1)
    verb, word = rng.choice([("sells", "sold"), ("uses", "used"), ("drops", "dropped")])
    asked = (f"{name} packs {count} boxes with {each} {things} each and {verb} {used} of the {things}. "
             f"How many {things} were not {word}?")
    left = total - used
    thought = f"{count} boxes of {each}: {count} * {each} = {total}. Without the {word}: {total} - {used} = {left}."
    return Task("boxes", asked, thought, f"{left} {things} were not {word}")


KINDS: tuple[Callable[[random.Random], Task], ...] = (
    addition, subtraction, multiplication, progression, sorting, largest, reversal, replacement, counting, story, boxes,
)


def tasks(seed: int, *, held_out: bool = False) -> Iterator[Task]:
    """Yield tasks without end, kinds in turn; the same seed gives the same ones."""
    rng = random.Random(seed)
    while True:
        for kind in KINDS:
            task = kind(rng)
            while is_held_out(task.question) != held_out:
                task = kind(rng)
            yield task


def is_held_out(question: str) -> bool:
    """Say whether training must not see a question."""
    return zlib.crc32(question.encode()) % _HELD_OUT_SHARE == 0


def _number(rng: random.Random, fewest: int, most: int) -> int:
    digits = rng.randint(fewest, most)
    return rng.randint(10 ** (digits - 1), 10**digits - 1)


def _spaced(number: int) -> str:
    return " ".join(str(number))


def main() -> None:
    """Write different questions as prompts, one JSON object a line with id, messages and the answer."""
    parser = argparse.ArgumentParser(prog="python -m tiny_kimi.tasks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, required=True, help="questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="questions that training never sees")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    given = parser.parse_args()
    seen: dict[str, Task] = {}
    for task in tasks(given.seed, held_out=given.held_out):
        seen.setdefault(task.question, task)
        if len(seen) == given.count:
            break
    rows = ({"id": f"{task.kind}-{number:04}", "messages": [{"role": "user", "content": task.question}],
             "answer": task.answer} for number, task in enumerate(seen.values()))
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
