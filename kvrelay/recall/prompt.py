"""The prompt of a document and a question: the chat format, written out.

The document is the system message, so the prompt of every question over one document begins
with the same tokens. The tokenizer's chat template renders the same text.
"""

from typing import Final

from kvrelay.recall.facts import Document, FactQuestion

BEGIN: Final = "<s>"
END: Final = "<|end|>"
PAD: Final = "<|pad|>"
UNKNOWN: Final = "<|unk|>"
SYSTEM: Final = "<|system|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
SPECIAL: Final = (UNKNOWN, PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def prefix(document: Document) -> str:
    """The part of a prompt that all questions over `document` share."""
    return f"{BEGIN}{SYSTEM}{document.text}{END}"


def turn(question: FactQuestion) -> str:
    """The part of a prompt that follows the prefix, or an earlier turn and its answer."""
    return f"{USER}{question.text}{END}{ASSISTANT}"


def prompt(document: Document, question: FactQuestion) -> str:
    """The whole prompt; the expected output is `question.answer`, then `END`."""
    return prefix(document) + turn(question)


def messages(document: Document, question: FactQuestion) -> list[dict[str, str]]:
    """The same prompt as chat messages, for a chat endpoint or `apply_chat_template`."""
    return [
        {"role": "system", "content": document.text},
        {"role": "user", "content": question.text},
    ]
