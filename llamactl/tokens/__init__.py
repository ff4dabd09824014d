"""Text to token ids and back, as a model's own files say: vocabularies, streams of tokens, chat templates, ends.

    tokenizer = open_tokenizer("./model")
    ids = tokenizer.encode("Hello")
    stream = Stream(tokenizer, stop=["\\n\\n"])
    print("".join(stream.push(i) for i in ids) + stream.flush())

Without torch. A file is read as its own package reads it: tokenizer.json by `tokenizers`, SentencePiece models by
`sentencepiece`; every other source is put into one of these two in memory.
"""

from llamactl.tokens.chat import chat
from llamactl.tokens.opening import open_tokenizer
from llamactl.tokens.raw import byte_tokenizer
from llamactl.tokens.settings import end_tokens, sampling_defaults
from llamactl.tokens.stream import Stream
from llamactl.tokens.tokenizer import Tokenizer

__all__ = ["Stream", "Tokenizer", "byte_tokenizer", "chat", "end_tokens", "open_tokenizer", "sampling_defaults"]
