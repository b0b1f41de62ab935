"""Equal blocks of a chain are found."""

from __future__ import annotations

from sft.plan.chain.chain import Block, Chain, Stage, equal_blocks, stage_classes


def _chain(letters: str, input_bytes: int = 1) -> Chain:
    """A stage for each letter; the same letter is the same stage."""
    return Chain(
        input_bytes=input_bytes,
        stages=tuple(Stage(forward_seconds=ord(letter), backward_seconds=1, output_bytes=1, grad_bytes=1) for letter in letters),
        input_grad_bytes=1,
    )


def test_equal_stages_have_equal_numbers() -> None:
    assert stage_classes(_chain("abacb")) == (0, 1, 0, 2, 1)


def test_blocks_are_found_in_their_shortest_form() -> None:
    assert equal_blocks(_chain("xababababyzzz")) == (Block(first=2, length=2, count=4), Block(first=11, length=1, count=3))
    assert equal_blocks(_chain("aaaaaa")) == (Block(first=1, length=1, count=6),)
    assert equal_blocks(_chain("abcd")) == ()


def test_a_block_whose_input_differs_is_no_equal_block() -> None:
    assert equal_blocks(_chain("aaaa", input_bytes=2)) == (Block(first=2, length=1, count=3),)
