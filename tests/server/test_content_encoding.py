"""Compressed bodies are decompressed in small pieces; what cannot be is refused."""

import gzip
import zlib

import pytest
from starlette.exceptions import HTTPException

from server.content_encoding import PIECE_BYTES, decoder_of

TEXT = b"".join(b'{"prompt": "number %d"}' % i for i in range(20_000))


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


FORMS = {
    "": TEXT,
    "identity": TEXT,
    "gzip": gzip.compress(TEXT),
    "x-gzip": gzip.compress(TEXT, 1),
    " GZIP ": gzip.compress(TEXT),
    "deflate": zlib.compress(TEXT),
    "Deflate": raw_deflate(TEXT),
}


def decoded(name: str, data: bytes, step: int) -> list[bytes]:
    decoder = decoder_of(name)
    pieces = [p for i in range(0, len(data), step) for p in decoder.pieces(data[i : i + step])]
    decoder.finish()
    return pieces


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("step", [1, 1000, 10**7])
def test_every_form_gives_the_same_bytes_in_small_pieces(name, step) -> None:
    pieces = decoded(name, FORMS[name], step)
    assert b"".join(pieces) == TEXT
    assert max(map(len, pieces)) <= PIECE_BYTES


@pytest.mark.parametrize("name", ["gzip", "deflate"])
def test_a_bomb_comes_in_small_pieces_too(name) -> None:
    zeros = bytes(64 * 2**20)
    bomb = gzip.compress(zeros) if name == "gzip" else raw_deflate(zeros)
    pieces = decoder_of(name).pieces(bomb)
    assert [len(next(pieces)) for _ in range(5)] == [PIECE_BYTES] * 5


@pytest.mark.parametrize("name", ["gzip", "deflate"])
@pytest.mark.parametrize("step", [1, 10**7])
def test_what_is_not_compressed_right_is_refused(name, step) -> None:
    good = FORMS[name]
    damaged = good[:200] + bytes([good[200] ^ 255]) + good[201:]
    cases = [b"", b"{", b'{"prompt":"a"}', good[:-1], good[: len(good) // 2], good + b"x", damaged]
    for data in cases:
        with pytest.raises(HTTPException) as caught:
            decoded(name, data, step)
        assert caught.value.status_code == 400
        assert name in caught.value.detail


@pytest.mark.parametrize("name", ["br", "zstd", "compress", "gzip, gzip", "gzip, deflate", "é"])
def test_other_encodings_are_named_in_a_415(name) -> None:
    with pytest.raises(HTTPException) as caught:
        decoder_of(name)
    assert caught.value.status_code == 415
    assert "Content-Encoding" in caught.value.detail
    assert caught.value.headers is not None
    assert caught.value.headers["Accept-Encoding"] == "gzip, deflate"
