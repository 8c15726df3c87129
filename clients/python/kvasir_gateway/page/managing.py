"""One agent of the page: where its memory lies, its history, and the forms that fork, roll back and delete it."""

from collections.abc import Mapping

from kvasir.errors import InvalidArgument
from kvasir.names import check_agent_id
from starlette.responses import Response

from kvasir_gateway.page import looking
from kvasir_gateway.page.look import Handler, Look, version_of


class Managing:
    """The handlers of an agent's own page."""

    def pages(self) -> Mapping[str, Handler]:
        return {"agent": self._agent}

    def writes(self) -> Mapping[str, Handler]:
        return {"fork": self._fork, "rollback": self._rollback, "delete": self._delete}

    async def _agent(self, look: Look) -> Response:
        name = check_agent_id(look.query("id"), "id")
        seen = await looking.agent(look.client, name, look.query("page_token"))
        return look.shown("agent.html", seen=seen, paged=bool(look.query("page_token")))

    async def _fork(self, look: Look) -> Response:
        name = check_agent_id(look.form.get("name", ""), "name")
        line, version = version_of(look.form.get("version", ""))
        await look.client.fork_agent(look.named(), name, line, version)
        return look.goto("agent", id=name, done="fork")

    async def _rollback(self, look: Look) -> Response:
        line, version = version_of(look.form.get("version", ""))
        _, head = version_of(look.form.get("head", ""))
        await look.client.rollback_agent(look.named(), version, line, expected_version=head)
        return look.goto("agent", id=look.named(), done="rollback")

    async def _delete(self, look: Look) -> Response:
        if look.form.get("typed") != look.named():
            raise InvalidArgument(
                "typed: expected the agent's name, letter by letter; nothing was deleted", field="typed"
            )
        await look.client.delete_agent(look.named(), force="force" in look.form)
        return look.goto(done="delete")
