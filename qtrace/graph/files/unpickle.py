"""A pickle machine that can only build data: it knows the opcodes of saved models, and asks before it acts.

Python's own unpickler decides too much by itself: Its BUILD sets attributes on whatever lies on the stack,
even on a class. Its REDUCE calls any callable; APPENDS and SETITEMS call methods of any object. Here lists,
dicts and sets are filled only when they are exactly that, and the three opcodes that make objects are left
to ``rules.Rules``.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

from qtrace.graph.files.allowlist import DamagedError, RefusedError
from qtrace.graph.files.plain_values import DICTS
from qtrace.graph.files.rules import Pending, Rules

Handler = Callable[[int], int]

STOP, PROTO = ord("."), ord("\x80")


class PickleMachine:
    """Runs one pickle.

    Args:
        data: the whole file; a ``bytes`` or ``mmap`` (big tensors are then copied once).
        rules: decides about names and makes the objects.
    """

    def __init__(self, data: Any, rules: Rules) -> None:
        self.data, self.rules = data, rules
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._table: list[Handler] = [_unknown(self, code) for code in range(256)]
        for group in (_scalars, _strings, _containers, _fill, _memo, _objects):
            for symbol, handler in group(self).items():
                self._table[ord(symbol)] = handler

    def run(self, start: int = 0) -> Any:
        """The object that the pickle describes.

        Args:
            start: position of the pickle in the data.

        Raises:
            RefusedError: when it asks for something that a model file may not have.
            DamagedError: when it is not a complete pickle of protocol 3 or later.
        """
        data, table, position = self.data, self._table, start
        try:
            position = self._protocol(position)
            while True:
                code = data[position]
                if code == STOP:
                    break
                position = table[code](position + 1)
        except IndexError:
            if position + 2 < len(data):
                raise DamagedError("it takes more from the stack than there is") from None
            raise DamagedError("it is cut short") from None
        if len(self.stack) != 1 or self.marks:
            raise DamagedError("it ends in the middle of an object")
        return self.stack[0]

    def _protocol(self, position: int) -> int:
        code, says = self.data[position], self.data[position + 1]
        if code != PROTO or not 3 <= says <= 5:
            protocol = says if code == PROTO else "not given"
            raise DamagedError(f"its pickle protocol is {protocol}, not 3, 4 or 5: save it again")
        return position + 2

    def pop_mark(self) -> list[Any]:
        """Everything above the last mark, taken off the stack."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def take(self, position: int, size: int) -> bytes:
        """``size`` bytes at ``position``."""
        chunk = self.data[position : position + size]
        if len(chunk) != size:
            raise DamagedError("it is cut short")
        return chunk


def _unknown(machine: PickleMachine, code: int) -> Handler:
    def refuse(position: int) -> int:
        raise DamagedError(f"byte {position - 1} is {code:#04x}, which is no part of a saved model")

    return refuse


def _scalars(machine: PickleMachine) -> dict[str, Handler]:
    data, push, take = machine.data, machine.stack.append, machine.take

    def constant(value: Any) -> Handler:
        def handler(position: int) -> int:
            push(value)
            return position

        return handler

    def byte(position: int) -> int:  # as `fixed`, only faster
        push(data[position])
        return position + 1

    def fixed(layout: str) -> Handler:
        unpack, size = struct.Struct(layout).unpack, struct.calcsize(layout)

        def handler(position: int) -> int:
            push(unpack(take(position, size))[0])
            return position + size

        return handler

    def long(position: int) -> int:
        start = position + 1
        size = data[position]
        push(int.from_bytes(take(start, size), "little", signed=True))
        return start + size

    def huge(position: int) -> int:  # to write one as a decimal number takes the square of its length
        size = int.from_bytes(take(position, 4), "little")
        raise RefusedError(f"it holds an integer of {size} bytes")

    return {
        "\x95": lambda position: position + 8,  # FRAME: how many bytes follow, a hint for readers of streams
        "N": constant(None),
        "\x88": constant(True),
        "\x89": constant(False),
        "K": byte,
        "M": fixed("<H"),
        "J": fixed("<i"),
        "G": fixed(">d"),
        "\x8a": long,
        "\x8b": huge,
    }


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise DamagedError("it holds text that is not UTF-8") from None


def _strings(machine: PickleMachine) -> dict[str, Handler]:
    data, push, take, intern = machine.data, machine.stack.append, machine.take, sys.intern

    def sized(layout: str, make: Callable[[bytes], Any]) -> Handler:
        unpack, head = struct.Struct(layout).unpack, struct.calcsize(layout)

        def handler(position: int) -> int:
            start = position + head
            size = unpack(take(position, head))[0]
            push(make(take(start, size)))
            return start + size

        return handler

    def short_text(position: int) -> int:
        start = position + 1
        end = start + data[position]
        push(intern(_decode(take(start, end - start))))  # mostly names of attributes
        return end

    return {
        "\x8c": short_text,
        "X": sized("<I", _decode),
        "\x8d": sized("<Q", _decode),
        "C": sized("B", bytes),
        "B": sized("<I", bytes),
        "\x8e": sized("<Q", bytes),
        "\x96": sized("<Q", bytearray),
    }


def _containers(machine: PickleMachine) -> dict[str, Handler]:
    stack, marks, pop_mark, rules = machine.stack, machine.marks, machine.pop_mark, machine.rules

    def empty(make: Callable[[], Any], size: int = 0) -> Handler:
        def handler(position: int) -> int:
            rules.budget.take(size)
            stack.append(make())
            return position

        return handler

    def tuple_of(count: int) -> Handler:
        def handler(position: int) -> int:
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
            return position

        return handler

    def mark(position: int) -> int:
        marks.append(len(stack))
        return position

    def tuple_from_mark(position: int) -> int:
        stack.append(tuple(pop_mark()))
        return position

    def frozenset_from_mark(position: int) -> int:
        items = pop_mark()
        for item in items:
            rules.keys.check(item, items)
        stack.append(frozenset(items))
        return position

    def discard(position: int) -> int:
        stack.pop()
        return position

    def discard_to_mark(position: int) -> int:
        pop_mark()
        return position

    return {
        ")": empty(tuple),
        "]": empty(list),
        "}": empty(dict),
        "\x8f": empty(set, sys.getsizeof(set())),
        "(": mark,
        "t": tuple_from_mark,
        "\x85": tuple_of(1),
        "\x86": tuple_of(2),
        "\x87": tuple_of(3),
        "\x91": frozenset_from_mark,
        "0": discard,
        "1": discard_to_mark,
    }


def _fill(machine: PickleMachine) -> dict[str, Handler]:
    stack, pop_mark, check_key = machine.stack, machine.pop_mark, machine.rules.keys.check
    pop = stack.pop

    def target(kinds: tuple[type, ...]) -> Any:
        container = stack[-1]
        if type(container) not in kinds:  # exactly: a subclass could bring its own append or __setitem__
            raise RefusedError(f"it puts items into a {type(container).__name__}")
        return container

    def append(position: int) -> int:
        item = pop()
        target((list,)).append(item)
        return position

    def appends(position: int) -> int:
        items = pop_mark()
        target((list,)).extend(items)
        return position

    def set_pairs(items: list[Any]) -> None:
        into = target(DICTS)
        for i in range(0, len(items), 2):
            if type(items[i]) is not str:
                check_key(items[i], into)
            into[items[i]] = items[i + 1]

    def setitem(position: int) -> int:
        value, key = pop(), pop()
        set_pairs([key, value])
        return position

    def setitems(position: int) -> int:
        set_pairs(pop_mark())
        return position

    def additems(position: int) -> int:
        items = pop_mark()
        into = target((set,))
        for item in items:
            check_key(item, into)
        into.update(items)
        return position

    return {"a": append, "e": appends, "s": setitem, "u": setitems, "\x90": additems}


def _memo(machine: PickleMachine) -> dict[str, Handler]:
    data, stack, memo, take = machine.data, machine.stack, machine.memo, machine.take
    push, uint32 = stack.append, struct.Struct("<I").unpack

    def memoize(position: int) -> int:
        memo[len(memo)] = stack[-1]
        return position

    def get1(position: int) -> int:
        push(memo[data[position]])
        return position + 1

    def get4(position: int) -> int:
        push(memo[uint32(take(position, 4))[0]])
        return position + 4

    def put1(position: int) -> int:
        memo[data[position]] = stack[-1]
        return position + 1

    def put4(position: int) -> int:
        memo[uint32(take(position, 4))[0]] = stack[-1]
        return position + 4

    return {"\x94": memoize, "h": get1, "j": get4, "q": put1, "r": put4}


def _objects(machine: PickleMachine) -> dict[str, Handler]:
    data, stack, memo, rules = machine.data, machine.stack, machine.memo, machine.rules
    push, pop = stack.append, stack.pop

    def line(position: int) -> tuple[str, int]:
        end = data.find(b"\n", position)
        if end < 0:
            raise DamagedError("it is cut short")
        return _decode(data[position:end]), end + 1

    def global_(position: int) -> int:
        module, position = line(position)
        name, position = line(position)
        push(rules.names.find(module, name))
        return position

    def stack_global(position: int) -> int:
        name, module = pop(), pop()
        push(rules.names.find(module, name))
        return position

    def newobj(position: int) -> int:
        args = pop()
        stack[-1] = rules.new(stack[-1], args)
        return position

    def reduce(position: int) -> int:
        args = pop()
        stack[-1] = rules.call(stack[-1], args)
        return position

    def build(position: int) -> int:
        state = pop()
        before = stack[-1]
        after = rules.build(before, state)
        if type(before) is Pending:
            stack[-1] = after
            for count, index in enumerate(reversed(memo)):
                if memo[index] is before:
                    memo[index] = after
                    break
                if count > 64:  # it was memoized just before its small state, or not at all
                    break
        return position

    return {"c": global_, "\x93": stack_global, "\x81": newobj, "R": reduce, "b": build}
