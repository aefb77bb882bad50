"""Errors of autopar have one base, `autopar.AutoparError`, and may be sent between processes."""

from __future__ import annotations

import pickle

import pytest

import autopar
from autopar import letters
from autopar.commands.models import NoModel

KINDS = [kind for kind in vars(letters).values() if isinstance(kind, type) and issubclass(kind, Exception)]


def test_the_older_name_catches_every_error():
    assert autopar.Letter is autopar.AutoparError
    with pytest.raises(autopar.Letter, match="known to nobody"):
        raise autopar.AutoparError("known to nobody")


@pytest.mark.parametrize("kind", [*KINDS, NoModel], ids=lambda kind: kind.__name__)
def test_an_error_is_an_autopar_error_and_stays_one_in_another_process(kind):
    assert issubclass(kind, autopar.AutoparError)
    sent = kind("no plan fits", at="model.py:3", seen="8 GiB", advice="a wider mesh")
    came = pickle.loads(pickle.dumps(sent))
    assert type(came) is kind and str(came) == str(sent) and came.parts == sent.parts
    assert str(came).splitlines()[0] == "no plan fits" and "    try     a wider mesh" in str(came)
