"""Templates of requests, rendered in processes with limits."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from tests.text.test_chat_template import TEMPLATES, TOOLS
from toolkit.errors import InvalidRequestError, ServerUnavailableError
from toolkit.text import template_pool
from toolkit.text.chat_template import describe, render_template
from toolkit.text.template_pool import TemplatePool

CONVERSATION = [
    {"role": "user", "content": "日本 <b> {{ 1 }} \ud800"},
    {"role": "assistant", "content": "so far", "thinking": "hm", "nothing": None},
]
SLOW = "{{ range(99999)" + "|map('string')|map('upper')" * 20 + "|list|length }}"
ENDLESS = SLOW * 30
HUGE = "{{ 'x' * 10 ** 12 }}"
INDENTED = "{{ ('a\n' * 10 ** 6) | indent(2000) }}"
FAST = "{{ messages[0].content }}"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def pool() -> AsyncIterator[TemplatePool]:
    pool = TemplatePool()
    yield pool
    await pool.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_pool, "MAX_SECONDS", 0.3)


def processes() -> list[psutil.Process]:
    return [
        one
        for one in psutil.Process().children()
        if one.status() != psutil.STATUS_ZOMBIE and "toolkit.text.template_process" in one.cmdline()
    ]


async def refusal(pool: TemplatePool, template: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await pool.render(template, {}, HELLO)
    assert caught.value.param == "chat_template"
    return caught.value.message


OPTIONS = [
    {"add_generation_prompt": True},
    {"tools": TOOLS, "enable_thinking": False, "x": [10**40, float("inf"), None], "template": 1},
    {"add_generation_prompt": False, "continue_final_message": True, "documents": [{"title": "t"}]},
]


def render_here(*given: Any, **options: Any) -> str:
    """Return the text, or the problem."""
    try:
        return render_template(*given, **options)
    except Exception as error:
        return describe(error)


async def test_process_renders_what_this_process_renders(pool: TemplatePool) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    own = "{{ x }}{{ template }}{{ eos_token }}{{ strftime_now('%Y') }}{{ messages | tojson }}"
    for template in (*TEMPLATES.values(), own):
        for options in OPTIONS:
            given = {"messages": CONVERSATION, **options}
            try:
                found = await pool.render(template, special, given)
            except InvalidRequestError as error:
                found = error.message.split("rendered: ")[1]
            assert found == render_here(template, special, **given)
    assert len(processes()) == 1


async def test_wrong_template_is_refused_with_its_problem(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep the process for other templates."""
    monkeypatch.setattr(template_pool, "MAX_SECONDS", 60.0)  # for machines that are busy
    await pool.render(FAST, {}, HELLO)
    [process] = processes()
    for template, problem in (
        ("{% for %}", "line 1: Expected an expression"),
        ("{% for a in [1] %}" * 90 + "{% endfor %}" * 90, "nested too deeply"),
        ("{{ " + "[" * 900 + "]" * 900 + " }}", "nested too deeply"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ 1 | dictsort }}", "no attribute 'items'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 'x' * 40000000 }}", "more than 33554432 characters"),
    ):
        assert problem in await refusal(pool, template)
        assert await pool.render(FAST, {}, HELLO) == "hello"
        assert processes() == [process]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (ENDLESS, r"longer than 0.3 seconds"),
        (HUGE, "512 MiB of memory"),
    ],
    ids=["time", "memory"],
)
async def test_process_beyond_a_limit_is_replaced(
    pool: TemplatePool, short: None, template: str, problem: str
) -> None:
    assert problem in await refusal(pool, template)
    assert not processes()
    assert await pool.render(FAST, {}, HELLO) == "hello"


async def test_memory_of_a_filter_is_bounded(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_pool, "MAX_SECONDS", 60.0)
    assert "512 MiB of memory" in await refusal(pool, INDENTED)


async def test_other_templates_do_not_wait_for_a_slow_one(pool: TemplatePool) -> None:
    slow = asyncio.create_task(pool.render(ENDLESS, {}, HELLO))
    await asyncio.sleep(0)
    assert await pool.render(FAST, {}, HELLO) == "hello"
    assert not slow.done()
    slow.cancel()
    await asyncio.wait([slow])


async def test_number_of_processes_is_bounded(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_pool, "MAX_PROCESSES", 2)
    pool = TemplatePool()
    texts = await asyncio.gather(*(pool.render(FAST, {}, HELLO) for _ in range(20)))
    assert texts == ["hello"] * 20
    assert len(processes()) == 2
    await pool.close()
    assert not processes()


async def test_cancellation_ends_the_rendering(pool: TemplatePool) -> None:
    rendering = asyncio.create_task(pool.render(ENDLESS, {}, HELLO))
    while not processes() and not rendering.done():
        await asyncio.sleep(0.01)
    rendering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rendering
    assert not processes()
    assert await pool.render(FAST, {}, HELLO) == "hello"


async def test_dead_idle_process_is_replaced(pool: TemplatePool) -> None:
    await pool.render(FAST, {}, HELLO)
    [process] = processes()
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(0.005)
    assert await pool.render(FAST, {}, HELLO) == "hello"


async def test_idle_process_that_dies_before_its_job_is_replaced(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.render(FAST, {}, HELLO)
    processes()[0].kill()
    monkeypatch.setattr(TemplatePool, "_take_idle", lambda pool: pool._idle.pop())  # no check
    assert await pool.render(FAST, {}, HELLO) == "hello"


async def test_process_that_does_not_start_is_a_503(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ServerUnavailableError, match="exit code 1"):
        await pool.render(FAST, {}, HELLO)


async def test_process_has_no_secrets_of_the_server(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TK_API_KEY", "sesame")
    await pool.render(FAST, {}, HELLO)
    [process] = processes()
    assert "sesame" not in str(process.environ())


def test_process_ends_with_its_parent() -> None:
    """Even while it renders."""
    code = f"""
import asyncio, os, subprocess
from toolkit.text.template_pool import TemplatePool

class Noted(subprocess.Popen):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        print(self.pid, flush=True)
        asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), 9)

subprocess.Popen = Noted
asyncio.run(TemplatePool().render({ENDLESS!r}, {{}}, {HELLO!r}))
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        orphan = psutil.Process(int(run.stdout))
        while orphan.status() != psutil.STATUS_ZOMBIE:  # init reaps it when it likes
            time.sleep(0.01)
