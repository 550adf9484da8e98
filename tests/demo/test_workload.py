"""The demo's requests: the same on every machine, and shaped as the demo claims."""

import hashlib

import msgspec

from stepwell.demo.main import FULL, QUICK, SEED
from stepwell.demo.workload import Phase, chat_request, chats, document_requests, restart_requests


def digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]


def test_requests_are_the_same_on_every_machine() -> None:
    assert digest(document_requests(FULL, SEED)) == "bc6de8dfa1e71e68"
    assert digest(chats(FULL, SEED)) == "0bc248f54ea96de2"
    assert digest(document_requests(FULL, SEED + 1)) != digest(document_requests(FULL, SEED))


def test_documents_are_asked_about_in_turn_and_differ_from_the_first_words_on() -> None:
    requests = document_requests(FULL, SEED)
    assert len(requests) == FULL.documents * FULL.rounds
    first, again = requests[0].messages[0].content, requests[FULL.documents].messages[0].content
    shared = len(first.rsplit("\n\n", 1)[0])
    assert first[:shared] == again[:shared] and first != again
    beginnings = {request.messages[0].content[:60] for request in requests}
    assert len(beginnings) == FULL.documents


def test_the_restarted_engine_is_asked_the_first_questions_word_for_word() -> None:
    restart = restart_requests(QUICK, SEED, Phase.RESTART)
    first_round = document_requests(QUICK, SEED)[: QUICK.documents]
    assert [request.messages for request in restart] == [request.messages for request in first_round]
    assert {request.phase for request in restart} == {Phase.RESTART}


def test_each_turn_of_a_chat_carries_the_whole_history_with_the_answers() -> None:
    chat = chats(FULL, SEED)[1]
    answers = ["one", "two"]
    first, second, third = (chat_request(chat, answers[:turn]).messages for turn in range(3))
    assert [message.role for message in third] == ["user", "assistant", "user", "assistant", "user"]
    assert [message.content for message in third[1::2]] == answers
    assert third[: len(second)] == second and second[: len(first)] == first
