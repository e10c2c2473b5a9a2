"""Parse the PTX of one kernel into a list of instructions with resolved registers and branch targets."""
import re
from typing import NamedTuple

# bytes of a register of this type; 0: a predicate
SIZES = {"pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4,
         "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}
UNUSED = "_"               # the operand of a result that nobody reads
# what a statement can begin with: { or } of a scope, a label, or an instruction or declaration up to ";"
STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[A-Za-z_$][\w$]*)\s*:(?!:)|(?P<text>[^;]+);)")


class Unsupported(Exception):
    """The kernel uses something that the emulator does not know."""


class Register(NamedTuple):
    index: int
    size: int              # bytes; 0: a predicate


class Special(NamedTuple):
    name: str              # such as %tid.x


class Symbol(NamedTuple):
    name: str              # a parameter, a variable or a label


class Number(NamedTuple):
    bits: int              # an integer of any width, or the bits of a float
    is_float: bool = False


class Vector(NamedTuple):
    parts: tuple           # {%r1, %r2}


class Address(NamedTuple):
    base: object           # [base + offset], or [base, {coordinates}]
    offset: int
    coordinates: tuple


class Pair(NamedTuple):
    first: object          # %r1|%p1
    second: object


class Instruction(NamedTuple):
    opcode: str
    operands: tuple
    guard: Register | None          # @%p1: only lanes where this predicate is true
    negated: bool                   # @!%p1
    text: str
    target: int | None = None       # of a branch: index of an instruction

    @property
    def parts(self):
        return self.opcode.split(".")


class Kernel(NamedTuple):
    name: str
    parameters: dict       # {name: bytes}
    code: list             # of Instruction
    targets: set           # indices of the instructions that branches lead to or follow
    sizes: list            # bytes of each register
    threads: int | None    # per program, from .reqntid


def parse(text):
    """Return the Kernel of a PTX text with one entry and no calls."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    text = re.sub(r"^\s*\.(loc|file)\b[^\n]*", "", text, flags=re.M)
    header = re.search(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", text, re.S)
    parameters = dict(parse_parameter(x) for x in header[2].split(",") if x.strip())
    threads = re.search(r"\.reqntid\s+(\d+)", header[3])
    body = Body()
    body.parse(text, header.end())
    targets = body.resolve_branches()
    return Kernel(header[1], parameters, body.code, targets, body.sizes, int(threads[1]) if threads else None)


def parse_parameter(text):
    """Return (name, bytes) of a declaration such as ".param .align 64 .b8 name[128]"."""
    words = text.split()
    name, count = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", words[-1]).groups()
    kind = next(word[1:] for word in words[1:] if word[1:] in SIZES)
    return name, SIZES[kind] * int(count or 1)


class Body:
    """Parser state for the statements of a kernel. Inline assembly has scopes with names of its own."""

    def __init__(self):
        self.registers, self.labels = {}, {}       # by (scope, name)
        self.sizes, self.code, self.branches = [], [], []
        self.scopes, self.scope_count = [0], 1     # the open scopes, innermost last

    def parse(self, text, start):
        """Parse from the position after the entry's { to its }."""
        while self.scopes:
            found = STATEMENT.match(text, start)
            start = found.end()
            if found["brace"] == "{":
                self.scopes.append(self.scope_count)
                self.scope_count += 1
            elif found["brace"]:
                self.scopes.pop()
            elif found["label"]:
                self.labels[self.scopes[-1], found["label"]] = len(self.code)
            else:
                self.add_statement(found["text"].strip())

    def add_statement(self, text):
        """Add an instruction, or the registers of a declaration."""
        if text.startswith(".reg"):
            return self.declare(text)
        if text.startswith(".pragma"):
            return None
        if text.startswith("."):
            raise Unsupported(text)
        negated, guard, opcode, rest = re.match(r"(?:@(!?)(\S+)\s+)?([\w.:]+)\s*(.*)", text, re.S).groups()
        operands = tuple(self.operand(x) for x in split_at_commas(rest))
        if opcode.startswith("bra"):
            self.branches.append((len(self.code), tuple(self.scopes)))
        guard = self.operand(guard) if guard else None
        self.code.append(Instruction(opcode, operands, guard, negated == "!", " ".join(text.split())))

    def declare(self, text):
        """Add the registers of ".reg .b32 %r<9>" or ".reg .pred p, q"."""
        kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups()
        for name in names.split(","):
            numbered = re.fullmatch(r"\s*([%\w$]+)<(\d+)>\s*", name)
            all_names = [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [name.strip()]
            for one in all_names:
                self.registers[self.scopes[-1], one] = Register(len(self.sizes), SIZES[kind])
                self.sizes.append(SIZES[kind])

    def operand(self, text):
        """Return an operand as one of the classes above."""
        text = text.strip()
        if text == UNUSED:
            return UNUSED
        if text[0] == "{":
            return Vector(tuple(self.operand(x) for x in split_at_commas(text[1:-1])))
        if text[0] == "[":
            base, *coordinates = split_at_commas(text[1:-1])
            base, offset = re.fullmatch(r"\s*([^\s+]+)\s*(?:\+\s*(-?\w+))?\s*", base).groups()
            coordinates = tuple(self.operand(x) for x in coordinates)
            return Address(self.operand(base), int(offset or "0", 0), coordinates)
        if "|" in text:
            return Pair(*(self.operand(x) for x in text.split("|")))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return Number(int(text[2:], 16), True)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Number(int(text.rstrip("U"), 0))
        for scope in reversed(self.scopes):
            if (scope, text) in self.registers:
                return self.registers[scope, text]
        return Special(text) if text[0] == "%" else Symbol(text)

    def resolve_branches(self):
        """Set the target of each branch; return the indices of all instructions at which lanes may part or
        meet."""
        targets = {0}
        for at, scopes in self.branches:
            label = self.code[at].operands[0].name
            target = next(self.labels[scope, label] for scope in reversed(scopes)
                          if (scope, label) in self.labels)
            self.code[at] = self.code[at]._replace(target=target)
            targets |= {target, at + 1}
        return targets


def split_at_commas(text):
    """Return the parts between commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part for part in [*parts, text[start:]] if part.strip()]
