package main

import (
	"context"
	"fmt"
	"time"

	"github.com/posthorn/posthorn/dispatcher/memory"
)

// windowGrows is the time after which the window of an endpoint that responds after a second is measured.
const windowGrows = time.Minute

// measureSlow delivers to one destination and to 100 whose receiver responds after a second, with the defaults and a
// limit of the memory.
func measureSlow(ctx context.Context, b *bench) ([]row, error) {
	var rows []row
	for _, c := range []struct {
		n      int
		memory int64
		goal   float64
	}{{1, memory.Default, 900}, {100, memory.Default, 4000}, {100, 1 << 30, 6500}} {
		limited := &bench{root: b.root, sink: b.sink, memory: c.memory}
		got, err := limited.throughput(ctx, load{batch: 20, clients: 8, ahead: int64(max(20_000/c.n, 200)), warm: windowGrows},
			destinations(c.n, b.sink.Second))
		if err != nil {
			return nil, err
		}
		rows = append(rows,
			atLeast(fmt.Sprintf("delivered/s to %d that respond after 1 s, with %d MB", c.n, c.memory/1_000_000), got.rate, c.goal,
				fmt.Sprintf("%.0f/s, %.1f us CPU", got.rate, got.cpu)),
			below("  its resident memory", float64(got.rss), float64(c.memory), fmt.Sprintf("%d MB", got.rss/1_000_000),
				fmt.Sprintf("< %d MB", c.memory/1_000_000)))
	}
	return rows, nil
}

// measureAdaptive delivers to a receiver with a number of workers, and compares it with what they can do.
func measureAdaptive(ctx context.Context, b *bench) ([]row, error) {
	got, err := b.throughput(ctx, load{batch: 20, clients: 8, warm: windowGrows / 4}, destinations(1, b.sink.Workers))
	if err != nil {
		return nil, err
	}
	ratio := got.rate / (sinkWorkers / sinkWork.Seconds())
	return []row{
		atLeast(fmt.Sprintf("delivered/s to %d workers, of the most possible", sinkWorkers), ratio, 0.9, fmt.Sprintf("%.2f (%.0f/s)", ratio, got.rate)),
		atMost("  its requests at once", float64(got.most), 2*sinkWorkers, fmt.Sprint(got.most), fmt.Sprintf("<= %d", 2*sinkWorkers)),
	}, nil
}
