"""`hotneuron run`: one prompt in, one answer streamed out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import note, print_json
from hotneuron.models.errors import RequestError

_DEFAULT_PROMPT = "Why is the sky blue? Answer in three sentences."


@opt.takes_engine_options()
def run(
    model: opt.Model = opt.DEFAULT_MODEL,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Text to go on with; without it a question is asked.")
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Take the prompt from a file; -: stdin.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template, as a user's message.")
    ] = False,
    system: Annotated[str | None, typer.Option("--system", "-sys", help="System message; implies --chat.")] = None,
    predict: opt.Predict = 256,
    stop: opt.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", min=0, max=20, help="Log-probabilities of the N likeliest; needs --json."),
    ] = None,
    as_json: opt.Json = False,
    temperature: opt.Temperature = 0.8,
    seed: opt.Seed = 0,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    typical: opt.Typical = 1.0,
    repeat_penalty: opt.RepeatPenalty = 1.0,
    repeat_last: opt.RepeatLast = 64,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.LogitBias = None,
    *,
    options: opt.EngineOptions,
) -> None:
    """Answer one prompt and stream the answer to the terminal."""
    if prompt is not None and file is not None:
        raise RequestError("-p and -f both give a prompt; give one of them")
    sampling = opt.sampling_params(
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical=typical,
        repeat_penalty=repeat_penalty,
        repeat_last=repeat_last,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        logprobs=logprobs,
    )
    if file is not None:
        prompt = opt.read_text(file)
    asked_itself = prompt is None
    text = _DEFAULT_PROMPT if prompt is None else prompt
    from hotneuron.deploy.answer import ask, chat_tokens
    from hotneuron.deploy.session import engine_for

    with engine_for(model, options) as engine:
        if asked_itself and not as_json:
            note(f"> {text}")
        if chat or system is not None or (asked_itself and not engine.chat_template.is_fallback):
            messages = [{"role": "system", "content": system}] if system is not None else []
            ids = chat_tokens(engine, [*messages, {"role": "user", "content": text}])
        else:
            ids = list(engine.tokenizer.encode(text))
        answer = ask(engine, ids, sampling, max_tokens=predict, stop=stop, ignore_eos=ignore_eos, show=not as_json)
    if as_json:
        print_json(answer.as_json(logprobs is not None))
    else:
        print(flush=True)
        note(answer.summary())
    if answer.interrupted:
        raise typer.Exit(130)
