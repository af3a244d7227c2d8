"""How the served model writes tool calls and reasoning: settled once, when the server starts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.api.tools import Toolbox
from headrace.config import Settings
from headrace.errors import InvalidRequest
from headrace.grammar import calls as call_grammar
from headrace.grammar.calls import Way
from headrace.messages import Grammar
from headrace.sources.card import ModelCard
from headrace.text.answer_parser import AnswerParser
from headrace.text.calls.forms import FORMS, form_of, list_marks
from headrace.text.parts import Parser
from headrace.text.template_facts import TemplateFacts
from headrace.text.thinking import MARKS, Marks, Thinking, begun, marks_of
from headrace.text.tokenizer import Tokenizer


class Dialect(msgspec.Struct, frozen=True):
    """form: an entry of FORMS, "" if tools are refused. native: the template shows tools; else
    `text.conversation` does. kept: special tokens that the parsers must see."""

    form: str
    native: bool
    marks: Marks | None
    opens: str  # around a pythonic list
    closes: str
    special: frozenset[str]
    kept: frozenset[int]
    why: str  # for the log

    def begun(self, prompt: str, resumed: str) -> bool:
        """The answer begins inside of reasoning; see `thinking.begun`."""
        return self.marks is not None and begun(prompt, self.marks, resumed)

    def parser(self, tools: Toolbox | None, inside: bool) -> Callable[[], Parser] | None:
        """Makes the parser of each choice; None if nothing has to be told apart."""
        marks = self.marks
        if marks is None and tools is None:
            return None

        def make() -> Parser:
            thinking = Thinking(marks, inside=inside) if marks is not None else None
            if tools is None:
                return AnswerParser(thinking, None)
            return AnswerParser(thinking, FORMS[self.form](tools.names, forced=tools.must))

        return make

    def grammar(self, tools: Toolbox, inside: bool, text: Grammar | None) -> Grammar | None:
        """What keeps an answer to calls, or calls to their schemas. text: what is asked of an
        answer without calls. None: nothing is. Raises InvalidRequest."""
        way = self._way(inside)
        if tools.must:
            return call_grammar.forced(way, tools.offers, tools.most)
        if text is None and not tools.bound:
            return None
        return call_grammar.offered(way, tools.offers, tools.most, text)

    def after_thinking(self, inside: bool, grammar: Grammar) -> Grammar:
        """`grammar` for what comes behind the reasoning."""
        return call_grammar.after_thinking(self._way(inside), grammar)

    def check_tools(self) -> None:
        """Raise InvalidRequest if this server takes none."""
        if not self.form:
            raise InvalidRequest(
                "this server was started with --tool-parser none: it takes no tools", param="tools"
            )

    def _way(self, inside: bool) -> Way:
        marks = self.marks
        return Way(
            form=self.form,
            opens=self.opens,
            closes=self.closes,
            thinks=marks.opens if marks else "",
            thought=marks.closes if marks else "",
            inside=inside,
            special=self.special,
        )


def find_dialect(
    settings: Settings, card: ModelCard, facts: TemplateFacts, tokenizer: Tokenizer
) -> Dialect:
    """From the settings and the chat template."""
    template = card.chat_template or ""
    found, given = form_of(template), settings.tool_parser
    native = facts.takes_tools and bool(found or given != "auto")
    if given == "none":
        form, why = "", "none: by setting"
    elif given != "auto":
        form, why = given, f"{given}: by setting"
    elif native:
        form, why = found, f"{found}: from the chat template"
    else:
        form, why = "hermes", "hermes: the chat template shows no tools in a form known here"
    asked = settings.reasoning_parser
    marks = MARKS.get(marks_of(template) if asked == "auto" else asked)
    opens, closes = list_marks(template) if form == "pythonic" else ("", "")
    texts = {tokenizer.id_to_bytes(i).decode("utf-8", "replace"): i for i in tokenizer.special_ids}
    wanted = [*(FORMS[form].marks if form else ()), "</tool_call>", "[ARGS]", "[CALL_ID]", closes]
    wanted += [marks.opens, marks.closes] if marks else []
    kept = frozenset(texts[mark] for mark in wanted if mark in texts)
    why = f"tool calls {why}; reasoning {marks.opens if marks else 'none'}"
    return Dialect(form, native, marks, opens, closes, frozenset(texts), kept, why)
