"""Secrets: a login in an address is never kept or shown, whatever its password holds."""

from __future__ import annotations

import pytest

from layerparity.ground.errors import UserError
from layerparity.ground.secrets import redacted, refuse_login


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://me:word@there:5000/x", "at https://***@there:5000/x"),
        ("https://me:w@rd@there", "https://***@there"),
        ("https://me:w/o:r@d?@there/x", "https://***@there/x"),
        ("https://token@there and http://a:b@here", "https://***@there and http://***@here"),
        ('{"uri": "postgresql://me:word@there"}', '{"uri": "postgresql://***@there"}'),
        ("https://there:5000/x", "https://there:5000/x"),
        ("write to me@there", "write to me@there"),
    ],
)
def test_a_login_is_taken_out_up_to_the_last_sign_of_its_word(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize("uri", ["https://me:word@there", "https://there/?token=word"])
def test_an_address_with_more_than_a_place_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(UserError, match=r"^MLFLOW_URI holds a login or a token") as caught:
        refuse_login(uri, "MLFLOW_URI")
    assert "word" not in str(caught.value).replace("PASSWORD", "")
    refuse_login("https://there:5000/x")
