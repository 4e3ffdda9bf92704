"""The place of each row in the data, carried from one stage of a run to the next."""

from collections.abc import Mapping
from dataclasses import replace

from torchtitan.data.packing import Corpus, RowPosition, SourcePosition, SourceStream


def carried(positions: Mapping[str, RowPosition], old: Corpus, new: Corpus) -> dict[str, RowPosition]:
    """Positions of rows, by number, for another corpus: sources that are in both go on, others begin. Where documents
    are packed differently, a document or best-fit pool that has begun begins again."""
    former = {source.id: index for index, source in enumerate(old.sources)}
    same = old.stream is new.stream and (old.seq_len == new.seq_len or new.stream is SourceStream)
    carried = {}
    for number, position in positions.items():
        sources, epochs = [], []
        for place in (former.get(source.id) for source in new.sources):
            before = SourcePosition() if place is None else position.sources[place]
            sources.append(SourcePosition(before.documents, before.tokens, before.used if same else 0))
            epochs.append(0 if place is None else position.epochs[place])
        carried[number] = replace(position, sources=sources, epochs=epochs, uncounted=position.windows, turn=0)
    return carried
