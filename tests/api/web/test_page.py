"""The chat page at `/`, in a real browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.api.web.browser import FOUND, NAMES, Browser
from tests.local import LocalServer
from tests.server import Server as ServerProcess
from tests.server import until
from toolkit.api.app import make_app
from toolkit.api.http.server import ServedModel, Server
from toolkit.config import ServerConfig
from toolkit.demo import MODEL_DIR
from toolkit.metrics import Metrics

KEY = "right"
MAX_SIZE = 60_000  # bytes
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
QUESTION = "What is a KV cache?"
ANSWERED = "!jobs.size && document.querySelector('.turn:last-child .answer')"
CHAT = "*/v1/*completions"
HOSTILE = """<script>window.ran = 1</script> <img src=x onerror="window.ran = 1">

![p](https://evil.example/p.png) [a](javascript:window.ran=1) [b](https://good.example/)

```html
<script>window.ran = 1</script>
```
"""


def page_of(config: ServerConfig, **headers: str) -> httpx.Response:
    """Ask an application without a model for `/`."""
    engine: Any = SimpleNamespace(metrics=Metrics("tk", "model"))
    app = make_app(Server(config, [ServedModel(engine, ("model",))]))

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/", headers=headers)

    return asyncio.run(get())


@pytest.fixture(scope="module")
def document() -> httpx.Response:
    """The page of a server with keys, which it needs none of."""
    return page_of(ServerConfig(api_key=(KEY,)), **HTML)


@pytest.mark.parametrize(
    ("config", "accept"),
    [
        (ServerConfig(), "*/*"),
        (ServerConfig(), "application/json"),
        (ServerConfig(web=False), HTML["Accept"]),
    ],
)
def test_page_is_for_browsers_of_servers_that_have_it(config: ServerConfig, accept: str) -> None:
    answer = page_of(config, Accept=accept)
    assert (answer.status_code, answer.text) == (200, "tk is running")


def test_page_is_small_and_names_no_other_host(document: httpx.Response) -> None:
    assert document.status_code == 200
    assert document.headers["content-type"] == "text/html; charset=utf-8"
    assert len(document.content) <= MAX_SIZE
    hosts = set(re.findall(r"https?://[\w.]+", document.text))
    assert hosts == {"http://www.w3.org"}  # the name of SVG
    assert not re.findall(r'(?:src|href)="(?!#|docs"|data:)', document.text)


def test_policy_allows_the_pages_own_script_alone(document: httpx.Response) -> None:
    policy = document.headers["content-security-policy"]
    for name in ("script", "style"):
        ((text),) = re.findall(rf"<{name}>(.*?)</{name}>", document.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in policy
    for rule in (
        *("default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'"),
        *("form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"),
    ):
        assert f"{rule};" in policy
    assert document.headers["x-content-type-options"] == "nosniff"
    assert document.headers["referrer-policy"] == "no-referrer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The demo model, on a server with a key."""
    if FOUND is None:
        pytest.skip(f"needs a browser, one of {', '.join(NAMES)}: apt-get install {NAMES[0]}")
    served = LocalServer(
        *(str(MODEL_DIR), "--served-model-name", "tk-demo", "--api-key", KEY),
        cwd=tmp_path_factory.mktemp("server"),
    )
    served.http.headers["Authorization"] = f"Bearer {KEY}"
    yield served
    served.stop()


@pytest.fixture(scope="module")
def browser(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser on the page, after a wrong key and the right one."""
    browser = Browser(tmp_path_factory.mktemp("browser"))
    browser.call("Fetch.enable", patterns=[{"urlPattern": CHAT}])
    browser.open(server.url)
    browser.until("$('login').open")
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The page with the right key, and a new conversation. Its script must not fail."""
    if browser.run("$('login').open"):
        enter_key(browser, KEY)
        browser.until("!$('login').open")
    browser.until("chosen()")  # the test before may have loaded the page again
    browser.run("enter(newConversation())")
    browser.call("Fetch.disable")
    browser.call("Fetch.enable", patterns=[{"urlPattern": CHAT}])
    browser.events.clear()
    yield browser
    browser.run("'all events before this are read'")
    failures = [one for one in browser.events if one["method"] == "Runtime.exceptionThrown"]
    assert failures == []


def enter_key(browser: Browser, key: str) -> None:
    browser.run("$('login-key').select()")
    browser.type(key)
    browser.press("Enter", 13)


def ask(page: Browser, text: str) -> None:
    page.run("$('text').focus()")
    page.type(text)
    page.press("Enter", 13)


def let_through(page: Browser) -> dict[str, Any]:
    """Let a chat's request go to the server; return its body."""
    paused = page.event("Fetch.requestPaused")
    page.call("Fetch.continueRequest", requestId=paused["requestId"])
    return json.loads(paused["request"]["postData"])


def reply(page: Browser, text: str) -> dict[str, Any]:
    """Answer a chat's request in place of the server; return its body."""
    events = [{"choices": [{"delta": {"content": part}}]} for part in re.split(r"(?<= )", text)]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    body = respond(page, 200, stream)
    page.until(ANSWERED)
    return body


def respond(page: Browser, status: int, response: str) -> dict[str, Any]:
    """Send a response to a chat's request in place of the server; return the request's body."""
    paused = page.event("Fetch.requestPaused")
    encoded = base64.b64encode(response.encode()).decode()
    page.call(
        "Fetch.fulfillRequest", requestId=paused["requestId"], responseCode=status, body=encoded
    )
    return json.loads(paused["request"]["postData"])


def refuse(page: Browser, message: str, code: str | None = None) -> dict[str, Any]:
    return respond(page, 400, json.dumps({"error": {"message": message, "code": code}}))


def questions(body: dict[str, Any]) -> list[str]:
    return [one["content"] for one in body["messages"]]


def answer_of(server: ServerProcess, *messages: dict[str, str]) -> str:
    answer = server.http.post("/v1/chat/completions", json={"messages": messages})
    return answer.json()["choices"][0]["message"]["content"]


def test_a_wrong_key_is_refused_and_the_right_one_kept(
    browser: Browser, server: ServerProcess
) -> None:
    enter_key(browser, "wrong")
    browser.until("$('login-error').textContent")
    assert browser.run("$('login-error').textContent") == "The server refuses this key."
    assert browser.run("$('empty-facts').textContent") == "Settings take the server's key."
    enter_key(browser, KEY)
    browser.until("!$('login').open && $('model').value")
    assert browser.run("$('empty-name').textContent") == "tk-demo"
    browser.open(server.url)
    browser.until("$('model').value")
    assert browser.run("[$('login').open, localStorage.length]") == [False, 0]


def test_a_conversation_is_answered_and_kept(page: Browser, server: ServerProcess) -> None:
    ask(page, QUESTION)
    body = let_through(page)
    page.until(ANSWERED)
    first = {"role": "user", "content": QUESTION}
    said = answer_of(server, first)
    assert body["messages"] == [first]
    ask(page, "Why?")
    body = let_through(page)
    page.until(ANSWERED)
    assert body["messages"] == [
        first, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"},
    ]  # fmt: skip
    page.until("$('figure-kv').textContent.endsWith('%')")
    assert re.match(r"[\d.]+ ms|[\d.]+ s", page.run("$('figure-ttft').textContent"))
    assert "tokens · context" in page.run("document.querySelector('.facts').textContent")
    shown = page.run("$('turns').innerText")
    assert said in shown
    page.run("saved = null, location.reload()")
    page.until("typeof saved === 'undefined' && document.querySelectorAll('.turn').length === 2")
    assert page.run("$('turns').innerText") == shown
    assert page.run("document.querySelector('#list [aria-current]').innerText") == QUESTION


@pytest.mark.parametrize(
    ("how", "note"), [("stop", "Stopped."), ("reload", "This answer was interrupted.")]
)
def test_a_stopped_answer_ends_the_request(
    page: Browser, server: ServerProcess, how: str, note: str
) -> None:
    def aborted() -> float:
        return server.metric("tk:request_success_total", finished_reason="abort")

    before = aborted()
    with server.slowly():
        ask(page, QUESTION)
        let_through(page)
        page.until("document.querySelector('.answer > .md').innerText")
        assert page.run("$('send').getAttribute('aria-label')") == "Stop"
        if how == "stop":
            page.press("Escape", 27)
        else:
            page.run("location.reload()")
        page.until(f"$('turns').innerText.includes({note!r})")
        until(lambda: aborted() == before + 1)
    page.until("$('send').getAttribute('aria-label') === 'Send'")


def test_markup_in_an_answer_is_shown_as_text(page: Browser) -> None:
    ask(page, QUESTION)
    reply(page, HOSTILE)
    shown = page.run("document.querySelector('.answer').innerText")
    assert shown.count("<script>window.ran = 1</script>") == 2
    assert '<img src=x onerror="window.ran = 1">' in shown
    assert page.run("document.querySelectorAll('.answer :is(script, img)').length") == 0
    links = "[...document.querySelectorAll('.answer a')].map((one) => [one.href, one.rel])"
    assert page.run(links) == [
        ["https://evil.example/p.png", "noopener noreferrer"],
        ["https://good.example/", "noopener noreferrer"],
    ]
    insert = "document.body.insertAdjacentHTML('beforeend', '<b></b>')"
    assert page.run(f"try {{ {insert} }} catch (error) {{ error.name }}") == "TypeError"
    assert page.run("window.ran") is None


def test_text_from_right_to_left_is_shown_so_but_not_code(page: Browser) -> None:
    ask(page, "مرحبا")
    reply(page, "- مرحبا\n\n```py\nprint(1)\n```\n")
    direction = "getComputedStyle($('turns').querySelector('{}')).direction"
    shown = [page.run(direction.format(name)) for name in (".body", ".answer li", ".answer pre")]
    assert shown == ["rtl", "rtl", "ltr"]


def test_questions_are_edited_and_answered_again(page: Browser) -> None:
    ask(page, "one")
    reply(page, "first")
    ask(page, "two")
    reply(page, "second")
    page.run("document.querySelector('.turn:last-child .retry').click()")
    assert questions(reply(page, "other")) == ["one", "first", "two"]
    assert "2/2" in page.run("$('turns').innerText")
    page.run("document.querySelector('.version').click()")
    assert "second" in page.run("$('turns').innerText")
    page.run("document.querySelector('.question [aria-label^=Edit]').click()")
    assert page.run("$('text').value") == "one"
    page.run("$('text').select()")
    ask(page, "three")
    assert questions(reply(page, "third")) == ["three"]
    assert page.run("[current.turns.length, current.title]") == [1, "three"]
    page.run("document.querySelector('#list [aria-label^=Delete]').click()")
    page.until("!$('toast').hidden")
    assert page.run("conversations.some((one) => one.title === 'three')") is False
    page.run("document.querySelector('#toast button').click()")
    page.until("conversations.some((one) => one.title === 'three')")


def test_an_error_is_shown_until_there_is_an_answer(page: Browser) -> None:
    ask(page, "one")
    refuse(page, "Too hot.")
    page.until("document.querySelector('.error').textContent === 'Too hot.'")
    page.run("document.querySelector('.retry').click()")
    respond(page, 200, 'data: {"error": {"message": "Out of memory."}}\n\n')
    page.until("document.querySelector('.error').textContent === 'Out of memory.'")
    page.run("document.querySelector('.retry').click()")
    respond(page, 200, 'data: {"choices": [{"delta": {"content": "Some"}}]}\n\n')
    page.until("document.querySelector('.error').textContent.startsWith('The connection ended')")
    assert "Some" in page.run("$('turns').innerText")
    page.run("document.querySelector('.retry').click()")
    reply(page, "All")
    assert page.run("document.querySelector('.error').hidden")
    assert "2/2" in page.run("$('turns').innerText")  # only texts are kept


def test_the_oldest_turns_are_left_out_if_the_context_is_full(page: Browser) -> None:
    for text in ("one", "two"):
        ask(page, text)
        reply(page, text.upper())
    ask(page, "three")
    first = refuse(page, "Too long.", "context_length_exceeded")
    assert questions(first) == ["one", "ONE", "two", "TWO", "three"]
    assert questions(reply(page, "THREE")) == ["two", "TWO", "three"]
    assert "1 oldest left out" in page.run("$('turns').innerText")
    page.run("Object.assign(current.turns[2].answers[0], {prompt: 400, tokens: 100})")
    ask(page, "four")
    assert questions(reply(page, "FOUR")) == ["four"]


def test_a_model_without_a_chat_template_continues_the_text(page: Browser) -> None:
    page.run("models[0].tasks = ['generate'], showModel()")
    ask(page, "The sea is")
    stream = ['{"choices": [{"text": " calm"}]}', "[DONE]"]
    body = respond(page, 200, "".join(f"data: {data}\n\n" for data in stream))
    page.until(ANSWERED)
    assert (body["prompt"], body["max_tokens"]) == ("The sea is", 256)
    assert "calm" in page.run("document.querySelector('.answer').innerText")
    page.run("models[0].tasks.push('chat'), showModel()")


def test_an_answer_is_followed_until_the_user_scrolls_up(page: Browser) -> None:
    def rest() -> float:
        return page.run("$('talk').scrollHeight - $('talk').scrollTop - $('talk').clientHeight")

    ask(page, QUESTION)
    reply(page, "line\n" * 100)
    assert rest() < 2
    page.call("Input.dispatchMouseEvent", type="mouseWheel", x=700, y=300, deltaX=0, deltaY=-400)
    page.until("!$('latest').hidden")
    page.run("current.turns[0].answers[0].text += 'more\\n'.repeat(50)")
    page.run("viewOf(current.turns[0]).update(), follow()")
    assert rest() > 1000
    page.run("$('latest').click()")
    page.until("$('latest').hidden")
    assert rest() < 2


def test_settings_and_attachments_are_sent(page: Browser) -> None:
    page.run("showSettings()")
    for name, value in {"temperature": "0.5", "stop": "a\nb", "system": "Be brief."}.items():
        page.run(f"document.querySelector('#settings [name={name}]').focus()")
        page.type(value)
    page.run("document.querySelector('#settings .main').click()")
    page.until("!$('settings').open")
    long = "line\n" * 500
    page.run(
        "(() => { const data = new DataTransfer(); data.setData('text/plain', "
        f"{json.dumps(long)}); $('text').dispatchEvent(new ClipboardEvent('paste', "
        "{clipboardData: data})); })()"
    )
    page.run("attach([new File(['# ```x```'], 'notes.md')])")
    page.until("document.querySelectorAll('#chips li').length === 2")
    ask(page, "Sum this up")
    body = reply(page, "Done")
    page.run("showSettings(), $('sampling-reset').click(), $('settings').close()")
    page.run("delete settings.system")
    assert "temperature" not in page.run("sampling()")
    assert (body["temperature"], body["stop"]) == (0.5, ["a", "b"])
    system, question = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert f"501 lines:\n```\n{long}\n```" in question["content"]
    assert question["content"].endswith("notes.md:\n````\n# ```x```\n````\n\nSum this up")


def test_pictures_are_for_models_that_take_them(page: Browser) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4096, 8), "red").save(file, "PNG")
    encoded = base64.b64encode(file.getvalue()).decode()
    picture = f"new File([Uint8Array.from(atob('{encoded}'), (c) => c.charCodeAt())], 'a.png', " \
        "{type: 'image/png'})"  # fmt: skip
    page.run(f"attach([{picture}])")
    page.until("!$('toast').hidden")
    assert "tk-demo takes no pictures." in page.run("$('toast').innerText")
    page.run("models[0].input_modalities.push('image')")
    page.run(f"attach([{picture}])")
    page.until("document.querySelector('#chips img')")
    ask(page, "What is it?")
    image, text = reply(page, "Red")["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    url = image["image_url"]["url"]
    assert Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size == (2048, 4)
    page.run("models[0].input_modalities.pop()")


def test_tabs_show_and_stop_each_others_answers(page: Browser) -> None:
    """The page and a script in the place of another tab."""
    page.run("(tab = new BroadcastChannel('tk:/')).onmessage = ({data}) => (received = data)")
    page.run("received = null, toTab = (changed) => tab.postMessage({...current, ...changed})")
    state = "received?.turns?.[0].answers[0].state"
    ask(page, "one")
    page.until(f"{state} === 'running'")
    page.run("received = null, tab.postMessage(null)")  # the other tab is opened now
    page.until(f"{state} === 'running'")
    page.run("toTab({title: 'Named there'})")
    page.until("$('list').innerText.includes('Named there')")
    assert page.run("jobs.size") == 1
    page.run("received.turns[0].answers[0].state = 'stopped', toTab(received)")
    page.until(f"{ANSWERED} && $('turns').innerText.includes('Stopped.')")

    page.run("received.turns[0].answers[0].state = 'running', toTab(received)")
    page.until("$('send').getAttribute('aria-label') === 'Stop' && document.querySelector('.busy')")
    page.run("received = null")
    ask(page, "two")  # waits in the field
    assert page.run("[current.turns.length, $('text').value]") == [1, "two"]
    page.press("Escape", 27)
    page.until(f"{state} === 'stopped'")
    page.run("draft('', []), toTab({turns: undefined})")
    page.until("!current.turns.length && !$('list').innerText.includes('Named there')")
    page.run("tab.close()")


def test_an_answer_of_a_tab_that_is_gone_is_lost(page: Browser) -> None:
    """A tab that crashes says nothing. One that lives is asked, and answers."""
    page.run("tab = new BroadcastChannel('tk:/'), asked = 0")
    ask(page, "one")
    reply(page, "first")
    page.run("theirs = structuredClone(current), theirs.turns[0].answers[0].state = 'running'")
    page.run("tab.onmessage = ({data}) => data || (asked++, tab.postMessage(theirs))")
    page.run("tab.postMessage(theirs)")
    page.until("isRunning(current)")
    page.run(
        "[...Array(9)].reduce(async (before) => {"
        "await before; askTabs(); await new Promise((done) => setTimeout(done, 30)); }, 0)"
    )
    assert page.run("isRunning(current) && asked >= 9")
    page.run("tab.close(), [...Array(9)].forEach(askTabs)")
    assert page.run("isRunning(current)") is False
    assert "This answer was interrupted." in page.run("$('turns').innerText")


def test_conversations_are_renamed(page: Browser) -> None:
    ask(page, "one")
    reply(page, "first")
    page.run("$('list').querySelector('[aria-current]').focus()")
    page.run("prompt = () => ' Sorting ', document.activeElement.nextSibling.click()")
    page.until("$('list').querySelector('[aria-current]').innerText === 'Sorting'")
    page.run("prompt = () => null, rename(current)")
    assert page.run("store.all().then(([newest]) => newest.title)") == "Sorting"


def test_a_server_that_is_gone_is_named_below_the_message(page: Browser) -> None:
    page.call("Network.enable")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **offline)
    page.until("$('hint').textContent.startsWith('The server does not answer.')")
    page.call("Network.emulateNetworkConditions", offline=False, **offline)
    page.until("$('hint').textContent.startsWith('Enter sends')")


def test_models_are_listed_with_their_adapters(page: Browser) -> None:
    page.run(
        "models.push({...models[0], id: 'style', parent: 'tk-demo'}), send = ((send) => (path, "
        "...rest) => path === 'v1/models' ? new Response(JSON.stringify({data: models})) : "
        "send(path, ...rest))(send), loadModels()"
    )
    page.until("$('model').options.length === 2")
    assert page.run("$('model').querySelector('optgroup').label") == "Adapters of tk-demo"
    page.run("$('model').value = 'style', $('model').dispatchEvent(new Event('change'))")
    ask(page, QUESTION)
    assert reply(page, "Yes")["model"] == "style"
    page.run("location.reload()")
    page.until("$('model').value === 'tk-demo'")


def test_a_narrow_page_fits_and_everything_has_a_name(page: Browser) -> None:
    ask(page, QUESTION)
    reply(page, "| a | b |\n|--|--|\n| c | d |\n\n```py\n" + "x" * 200 + "\n```\n")
    size = {"width": 390, "height": 700, "deviceScaleFactor": 1}
    page.call("Emulation.setDeviceMetricsOverride", mobile=True, **size)
    assert page.run("document.documentElement.scrollWidth") == 390
    page.until("getComputedStyle($('side')).visibility === 'hidden'")
    page.run("$('side-open').focus()")
    page.press("Enter", 13)
    assert page.run("document.activeElement.id") == "new"
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    page.press("Escape", 27)
    assert page.run("document.activeElement.id") == "side-open"
    page.run("showSettings()")
    nodes += page.call("Accessibility.getFullAXTree")["nodes"]
    page.run("$('settings').close()")
    page.call("Emulation.clearDeviceMetricsOverride")
    roles = {"button", "textbox", "combobox", "spinbutton", "link", "dialog", "region"}
    found = [one for one in nodes if one.get("role", {}).get("value") in roles]
    assert len(found) > 20
    assert [one for one in found if not one.get("name", {}).get("value")] == []


MARKDOWN = {
    "# One\n## Two #": "<h3>One</h3><h4>Two</h4>",
    "a **b *c*** _d_ ~~e~~": "<p>a <strong>b <em>c</em></strong> <em>d</em> <del>e</del></p>",
    "5 * 3 * 2, snake_case_name": "<p>5 * 3 * 2, snake_case_name</p>",
    "`` a`b `` \\*x\\*": "<p><code>a`b</code> *x*</p>",
    "a\nb<br>c": "<p>a<br>b<br>c</p>",
    "- a\n  1. b\n  2. c\n\n- d\ne": (
        "<ul><li>a<ol><li>b</li><li>c</li></ol></li><li>d<br>e</li></ul>"
    ),
    "3. a\n4. [x] b": '<ol start="3"><li>a</li><li class="task">☑ b</li></ol>',
    "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    "---\n***": "<hr><hr>",
    "<b>&amp;</b>": "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>",
    "(https://a.b/c_d).": (
        '<p>(<a href="https://a.b/c_d" target="_blank" rel="noopener noreferrer">'
        "https://a.b/c_d</a>).</p>"
    ),
    "[a](data:x) [b](JavaScript:x)": "<p>[a](data:x) [b](JavaScript:x)</p>",
    "| a | b |\n|:-:|--:|\n| c \\| d | *e* |": (
        '<div tabindex="0" role="region" aria-label="Table" class="table"><table><thead><tr>'
        '<th class="center">a</th><th class="right">b</th></tr></thead><tbody><tr>'
        '<td class="center">c | d</td><td class="right"><em>e</em></td></tr></tbody></table></div>'
    ),
    "~~~py\nif x: # y\n": (
        '<figure class="code"><figcaption><span>py</span><button class="small">Copy'
        '</button></figcaption><pre tabindex="0" aria-label="Code, py"><code>'
        '<span class="k">if</span> x: <span class="c"># y</span>\n</code></pre></figure>'
    ),
}


def test_markdown_becomes_elements(page: Browser) -> None:
    show = (
        "(texts) => texts.map((text) => { const view = new MarkdownView(el('div')); "
        "view.update(text); return view.node.innerHTML; })"
    )
    shown = page.run(f"({show})({json.dumps(list(MARKDOWN))})")

    def attributes(html: str) -> str:
        return re.sub(r"<\w+ [^>]*>", lambda tag: " ".join(sorted(tag[0][:-1].split(" "))), html)

    assert list(map(attributes, shown)) == list(map(attributes, MARKDOWN.values()))


def test_markdown_that_grows_keeps_finished_blocks(page: Browser) -> None:
    """Any length of the text looks as if it had been shown at once."""
    text = "\n\n".join(MARKDOWN)
    assert page.run(f"""(() => {{
        const text = {json.dumps(text)}, growing = new MarkdownView(el("div")), kept = [];
        for (let end = 1; end <= text.length; end += 3) {{
            const whole = new MarkdownView(el("div"));
            growing.update(text.slice(0, end));
            whole.update(text.slice(0, end));
            if (growing.node.innerHTML !== whole.node.innerHTML) return text.slice(0, end);
            kept.push(growing.node.firstChild);
        }}
        return kept.at(-1) === kept.find((one) => one.textContent === "One") ? "same" : "new";
    }})()""") == "same"  # fmt: skip


CODE = """````js
let a = "x" /* two
lines */ + `three ${1}` // end
if (interval) '' + 12.5
````

```python3
s = \"\"\"a
b\"\"\" + 'c' # d
```
"""


def test_code_that_grows_keeps_what_cannot_change(page: Browser) -> None:
    """Each character looks as if all had been shown at once. The first token keeps its node."""
    assert page.run(f"""(() => {{
        const text = {json.dumps(CODE)}, growing = new MarkdownView(el("div")), kept = new Set();
        for (let end = 1; end <= text.length; end++) {{
            const whole = new MarkdownView(el("div"));
            growing.update(text.slice(0, end));
            whole.update(text.slice(0, end));
            if (growing.node.innerHTML !== whole.node.innerHTML) return text.slice(0, end);
            if (!/lines(?!.*12)/s.test(text.slice(0, end))) continue;
            kept.add(growing.node.querySelector(".k"));
        }}
        return kept.size;
    }})()""") == 1  # fmt: skip


def test_hostile_markdown_takes_little_time(page: Browser) -> None:
    texts = ["> " * 5000, "*" * 20000, "[" * 20000, "- " * 3000, "`" * 20000, "_a" * 9000,
             "**a " * 5000, "|" * 20000, "![" * 9000, "<" * 20000, "https://" * 2500]  # fmt: skip
    slowest = page.run(f"""Math.max(...{json.dumps(texts)}.map((text) => {{
        const began = performance.now();
        new MarkdownView(el("div")).update(text);
        return performance.now() - began;
    }}))""")
    assert slowest < 5000
