"""Mutated messages: fields at their bounds, then damaged bytes."""

from __future__ import annotations

import random
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

F = FieldDescriptor
WHOLE = (
    0,
    1,
    2,
    15,
    16,
    17,
    127,
    128,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-300,
    5e-324,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
)
TEXTS = ("", "a", "\0", "%s%n", "../../etc/passwd", "\u202e\U0001f4a5", "{{7*7}}", "x" * 5000)
BITS = {
    F.TYPE_INT32: 32,
    F.TYPE_SINT32: 32,
    F.TYPE_SFIXED32: 32,
    F.TYPE_INT64: 64,
    F.TYPE_SINT64: 64,
    F.TYPE_SFIXED64: 64,
    F.TYPE_ENUM: 31,
}
WIDE = (F.TYPE_UINT64, F.TYPE_FIXED64)
MOST = 3000  # elements added at once


class Mutator:
    """Draws from ``chance`` alone, so that a seed repeats it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def of(self, seed: Message) -> bytes:
        """One mutation of a message, as bytes."""
        made = type(seed)()
        made.CopyFrom(seed)
        for _ in range(self._chance.choice((0, 1, 1, 2, 4))):
            self._change(made)
        raw = made.SerializeToString()
        return self.damaged(raw) if self._chance.random() < 0.35 else raw

    def damaged(self, raw: bytes) -> bytes:
        """Bytes flipped, cut, repeated or put in."""
        data, chance = bytearray(raw), self._chance
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(6):
                case 0 if data:
                    data[at % len(data)] ^= 1 << chance.randrange(8)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = chance.randbytes(chance.choice((1, 4, 64)))
                case 3:
                    data[at:at] = data[: chance.choice((4, 64, 1024))]
                case 4:  # a field that says it is longer than all there is
                    data[at:at] = bytes([chance.randrange(1, 128) << 3 & 0xF8 | 2]) + b"\xff" * 4
                case _:
                    data[at:at] = b"\x0b" * chance.choice((1, 200))  # groups in groups
        return bytes(data)

    def _change(self, message: Message) -> None:
        descriptor = cast("Descriptor", message.DESCRIPTOR)
        if not descriptor.fields:
            return
        field = self._chance.choice(list(descriptor.fields))
        if field.is_repeated:
            self._change_list(message, field)
        elif field.message_type is not None:
            part = cast("Message", getattr(message, field.name))
            part.SetInParent()
            self._change(part)
        elif self._chance.random() < 0.2:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, self._value(field))

    def _change_list(self, message: Message, field: FieldDescriptor) -> None:
        chance, values = self._chance, getattr(message, field.name)
        if chance.random() < 0.3:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, item = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(chance.choice((1, 2, MOST))):
                values[self._value(key)] = self._value(item)
        elif field.message_type is not None:
            for _ in range(chance.choice((1, 2, 200))):
                self._change(values.add())
        else:
            value = self._value(field)
            count = 3 if isinstance(value, str | bytes) and len(value) > 64 else MOST
            values.extend([value] * chance.choice((1, 2, count)))

    def _value(self, field: FieldDescriptor) -> object:
        chance = self._chance
        match field.type:
            case F.TYPE_BOOL:
                return chance.random() < 0.5
            case F.TYPE_STRING:
                return chance.choice(TEXTS)
            case F.TYPE_BYTES:
                return chance.randbytes(chance.choice((0, 1, 16, 31, 32, 32, 33, 4096)))
            case F.TYPE_DOUBLE | F.TYPE_FLOAT:
                return chance.choice(FLOATS)
        return self._whole(field.type)

    def _whole(self, kind: int) -> int:
        value = self._chance.choice((*WHOLE, self._chance.randrange(300)))
        if kind in BITS:
            bits = BITS[kind]
            value %= 1 << bits
            return value if kind == F.TYPE_ENUM or value < 1 << (bits - 1) else value - (1 << bits)
        return value % (1 << (64 if kind in WIDE else 32))
