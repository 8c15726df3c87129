"""A page as a browser without scripts sees it: its elements, its text, and its forms, filled in and sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import httpx2 as httpx

# What a browser asks for; programs get other words at the root.
HTML = {"accept": "text/html"}
_EMPTY = frozenset({"meta", "link", "input", "img", "br", "hr"})


@dataclass
class Element:
    """A tag, its attributes, and the text inside it."""

    tag: str
    attributes: Mapping[str, str]
    parent: "Element | None" = None
    text: str = ""

    def is_in(self, other: "Element") -> bool:
        above: Element | None = self
        while above is not None and above is not other:
            above = above.parent
        return above is other


@dataclass
class Html:
    """The elements of a page, in order."""

    elements: list[Element] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        wanted = attributes.items()
        return [each for each in self.elements if each.tag == tag and wanted <= each.attributes.items()]

    def inside(self, element: Element, tag: str) -> list[Element]:
        return [each for each in self.all(tag) if each.is_in(element)]

    @property
    def text(self) -> str:
        return " ".join(self.all("body")[0].text.split())

    def form(self, name: str) -> Element:
        """The form that is sent to an address with this end."""
        return next(each for each in self.all("form") if each.attributes["action"].rpartition("/")[2] == name)

    def fields(self, form: Element) -> dict[str, str]:
        """What a browser would send, unless more is filled in."""
        given = {each.attributes["name"]: each.attributes.get("value", "") for each in self.inside(form, "input")}
        for select in self.inside(form, "select"):
            given[select.attributes["name"]] = self.inside(select, "option")[0].attributes["value"]
        for box in self.inside(form, "textarea"):
            given[box.attributes["name"]] = box.text
        return given


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = Html()
        self._open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        element = Element(tag, attributes, self._open[-1] if self._open else None)
        self.found.elements.append(element)
        if tag not in _EMPTY:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _EMPTY:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> ends nothing"
        assert self._open.pop().tag == tag, f"</{tag}> ends another element"

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data


def parsed(text: str) -> Html:
    """The page's elements. Fails unless every element is ended in its place."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert not parser._open
    return parser.found


class Browser:
    """Somebody with a cookie jar and no scripts, who knows the address of the overview."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.overview = f"{url}/"
        self._client = httpx.Client(headers=HTML, timeout=60)

    @property
    def cookies(self) -> dict[str, str]:
        return dict(self._client.cookies)

    def get(self, path: str = "", status: int = 200, **query: str) -> Html:
        """A page by its address, or by its name beside the overview."""
        return parsed(self.answer(path, status, **query).text)

    def answer(self, path: str = "", status: int = 200, **query: str) -> httpx.Response:
        answer = self._client.get(urljoin(self.overview, path), params=query or None)
        assert answer.status_code == status, answer.text
        return answer

    def post(self, name: str, fields: Mapping[str, str], /, **headers: str) -> httpx.Response:
        return self._client.post(urljoin(self.overview, name), data=fields, headers=headers)

    def send(self, page: Html, name: str, status: int = 200, /, **filled: str) -> Html:
        """Fill in a form of a page and send it, as a browser does; the page that follows."""
        form = page.form(name)
        answer = self._client.post(
            urljoin(self.overview, form.attributes["action"]),
            data={**page.fields(form), **filled},
            headers={"origin": self.url},
            follow_redirects=True,
        )
        assert answer.status_code == status, answer.text
        if name == "login" and status == 200:
            self.overview = f"{self.url}{urlsplit(str(answer.url)).path}"
        return parsed(answer.text)

    def sign_in(self, key: str, status: int = 200) -> Html:
        return self.send(self.get("/", 401), "login", status, key=key)
