"""Which format a file has, told from its first line."""

from enum import StrEnum

import msgspec

from stepwell.replay.traces import azure, bailian, burstgpt, mooncake, openai, weka


class Format(StrEnum):
    """The formats that can be read."""

    STEPWELL = "stepwell"
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"
    WEKA = "weka"
    OPENAI = "openai"
    AZURE = "azure"
    BURSTGPT = "burstgpt"


BLOCK_TOKENS = {
    Format.MOONCAKE: mooncake.BLOCK_TOKENS,
    Format.BAILIAN: bailian.BLOCK_TOKENS,
    Format.WEKA: weka.BLOCK_TOKENS,
    Format.OPENAI: openai.BLOCK_TOKENS,
}
"""Where nothing else is said. Formats without blocks have none; Stepwell's own says it in the file."""

_MARKS = (
    (b'"format"', Format.STEPWELL),
    (b'"requests"', Format.WEKA),
    (b'"block_size"', Format.WEKA),
    (b'"parent_chat_id"', Format.BAILIAN),
    (b'"messages"', Format.OPENAI),
    (b'"input_length"', Format.MOONCAKE),
    (b'"hash_ids"', Format.MOONCAKE),
    (b'"timestamp"', Format.MOONCAKE),
)


def detect(first_line: bytes) -> Format | None:
    """The format of a file that begins with this line; None when it is none of them."""
    if first_line.startswith(b"{"):
        if first_line == b"{":  # indented: only WEKA's sessions are one object a file
            return Format.WEKA
        return next((format for field, format in _MARKS if _has_field(first_line, field)), None)
    names = {name.strip(' "') for name in first_line.decode(errors="replace").split(",")}
    if names.issuperset(azure.COLUMNS):
        return Format.AZURE
    return Format.BURSTGPT if names.issuperset(burstgpt.COLUMNS) else None


def _has_field(line: bytes, field: bytes) -> bool:
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return field in line  # the reader will say what is wrong with it
    return field.strip(b'"').decode() in fields
