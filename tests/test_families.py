"""Some of the causal language model classes of transformers, drawn: each comes to what the committed list says.

`tools.check_families` runs all of them under every shape, a tenth in its quick form; here there are a hundredth and one
that is refused, and the pipeline of a TP 3 and an SP 3 stage stands for all.
"""

from __future__ import annotations

import pytest

from tests.support.family_verdicts import EQUAL, REASONS, SHAPES, drawn_names, expected, judge, short
from tests.support.tiny_families import class_names


@pytest.mark.parametrize("name", [*drawn_names(one_in=100), "ProphetNetForCausalLM"])
def test_equal_or_refused_as_listed(name: str) -> None:
    listed = expected()[name]
    _, verdicts = judge(name, {"mixed": SHAPES["mixed"]})
    assert short(verdicts["mixed"]) == (listed if isinstance(listed, str) else listed["mixed"]), verdicts


@pytest.mark.drawn
def test_attention_hands_on_rows_that_can_be_viewed_as_features() -> None:
    assert judge("AfmoeForCausalLM", {"sp3": "sp3"})[1]["sp3"] == EQUAL  # its code has `view` where others reshape


@pytest.mark.drawn
@pytest.mark.parametrize(
    "name",
    [
        "AriaTextForCausalLM",  # experts stored (experts, in, out)
        "Gemma3nForCausalLM",  # a mean over features of which a rank has a part: its MLP is computed whole
        "InklingForCausalLM",  # parameters of its own in what the plan sums, and a norm within the embeddings
    ],
)
def test_tensor_parallel_ranks_share_it(name: str) -> None:
    assert judge(name, {"tp3": "tp3"})[1]["tp3"] == EQUAL


def test_the_list_names_every_class_with_few_reasons() -> None:
    listed = expected()
    assert set(listed) == set(class_names())
    words = {word for each in listed.values() for word in ([each] if isinstance(each, str) else each.values())}
    assert words <= {EQUAL, *(reason for _, reason in REASONS)}
    assert sum(each == EQUAL for each in listed.values()) >= 80
