"""Answers a question from notes: one model finds those that are close to the question, one sorts
them by how well they fit, and one writes the answer. The clients are LangChain and `openai`.

Each model has a server, in a terminal of its own. A name is one of the hub; on a machine without it
give the folder of a model. The last server has the small carried model, which needs neither:

tpengine serve --http-port 8001 --port 50061 --model Qwen/Qwen3-Embedding-0.6B
tpengine serve --http-port 8002 --port 50062 --model Qwen/Qwen3-Reranker-0.6B --task score
tpengine serve --http-port 8003 --port 50063

pip install langchain-openai numpy
python examples/retrieval.py "When does the ferry to Saltby leave?"
"""

import argparse

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import OpenAI

NOTES = [
    "The ferry to Saltby leaves at eight in the morning, and on Sundays at ten.",
    "Saltby is a town of fishermen; its market is on Thursdays.",
    "The lighthouse keeper sells honey in front of his door.",
    "A ticket for the ferry costs four crowns; dogs travel without one.",
    "In winter the bakery opens at seven.",
    "The bus to the harbour takes twenty minutes from the station.",
]


def main() -> None:
    """Finds, sorts and answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("question")
    for name, port in (("embed", 8001), ("rerank", 8002), ("chat", 8003)):
        url = f"http://127.0.0.1:{port}/v1"
        parser.add_argument(f"--{name}", default=url, help="base URL (default: %(default)s)")
    parser.add_argument("--key", default="none", help="of the servers, if they ask for one")
    args = parser.parse_args()

    # The last argument: texts go to the server as they are, not as ids of OpenAI's own tokenizer.
    embeddings = OpenAIEmbeddings(**served(args.embed, args.key), check_embedding_ctx_length=False)
    store = InMemoryVectorStore.from_texts(NOTES, embeddings)
    close = [note.page_content for note in store.similarity_search(args.question, k=4)]
    print("close to the question:", *close, sep="\n  ")

    # OpenAI has no such endpoint, but its client sends a body to any path.
    body = {"query": args.question, "documents": close, "top_n": 2}
    reranker = OpenAI(base_url=args.rerank, api_key=args.key)
    ranks = reranker.post("/rerank", body=body, cast_to=object)["results"]
    best = [close[rank["index"]] for rank in ranks]
    print("best:", *best, sep="\n  ")

    notes = "\n".join(best)
    prompt = f"Answer from these notes alone.\n{notes}\nQuestion: {args.question}"
    chat = ChatOpenAI(**served(args.chat, args.key), temperature=0, max_tokens=64)
    print("answer:", chat.invoke(prompt).content)


def served(base_url: str, key: str) -> dict[str, str]:
    """What LangChain needs to know of a server, with the name of its model."""
    model = OpenAI(base_url=base_url, api_key=key).models.list().data[0].id
    return {"base_url": base_url, "api_key": key, "model": model}


if __name__ == "__main__":
    main()
