package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/test/process"
)

// measureShares measures a sender beside another namespace, or clients without a key, that use all they can get.
func measureShares(ctx context.Context, b *bench) ([]row, error) {
	disk, err := b.sharedDisk(ctx)
	if err != nil {
		return nil, fmt.Errorf("disk: %w", err)
	}
	places, err := b.sharedPlaces(ctx)
	if err != nil {
		return nil, fmt.Errorf("places: %w", err)
	}
	return append(disk, places...), nil
}

// sharedDisk compares the latencies of a sender with those while two Sources of another namespace, whose receiver is
// down, fill a small disk. It fails if a call of the sender is rejected.
func (b *bench) sharedDisk(ctx context.Context) ([]row, error) {
	mount := b.dir(fmt.Sprint("disk-", time.Now().UnixNano()))
	if err := os.MkdirAll(mount, 0o700); err != nil {
		return nil, err
	}
	if err := syscall.Mount("bench", mount, "tmpfs", 0, "size=300m"); err != nil {
		return []row{{Name: "a full disk: not measured, it needs root", Value: err.Error(), Met: true}}, nil
	}
	defer func() { _ = syscall.Unmount(mount, syscall.MNT_DETACH) }()
	dir := mount + "/data"
	evil := destinations(2, "127.0.0.1:1")
	evil[0].source, evil[1].source = 1, 2
	filling := config(evil)
	filling.Namespace, filling.Sources = "filling", filling.Sources[1:]
	data, _, err := liveconfig.Encode(filling)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(dir+".config-filling", data, 0o600); err != nil {
		return nil, err
	}
	p, err := b.startPattern(ctx, destinations(1, b.sink.Addr), dir, ".config*", "")
	if err != nil {
		return nil, err
	}
	defer p.stop()
	var id, accepted, refused atomic.Int64
	alone, err := goodLatencies(p, &id, closedAfter(b.window()))
	if err != nil {
		return nil, err
	}
	ended := make(chan struct{})
	var group errgroup.Group
	for source := 1; source <= 2; source++ {
		group.Go(func() error { return fillDisk(ctx, p.Addr, source, ended, &accepted, &refused) })
	}
	for full := time.Now().Add(2 * time.Minute); refused.Load() == 0 && time.Now().Before(full); {
		time.Sleep(10 * time.Millisecond) // The row is about the time when the namespace has its share.
	}
	time.AfterFunc(2*b.window(), func() { close(ended) })
	beside, err := goodLatencies(p, &id, ended)
	if e := group.Wait(); err == nil {
		err = e
	}
	if err != nil {
		return nil, err
	}
	_, peak := process.Memory(p.cmd.Process.Pid)
	p99, base := quantile(beside, 0.99), quantile(alone, 0.99)
	ratio := p99.Seconds() / max(base.Seconds(), 1e-6)
	return []row{
		below("p99 beside two Sources of another namespace that fill the disk, of alone", ratio, 3, fmt.Sprintf("%.2f (p99 %s of %s)", ratio, short(p99), short(base)), "<= 3"),
		atLeast("  batches of 240 KB of that namespace that were rejected", float64(refused.Load()), 1,
			fmt.Sprintf("%d of %d", refused.Load(), refused.Load()+accepted.Load())),
		below("  peak RSS", float64(peak), memory.Default, fmt.Sprintf("%d MB", peak>>20), "below 400 MB"),
	}, nil
}

// closedAfter returns a channel that is closed after a time.
func closedAfter(d time.Duration) <-chan struct{} {
	ended := make(chan struct{})
	time.AfterFunc(d, func() { close(ended) })
	return ended
}

// fillDisk sends a batch that cannot be compressed, again and again until ended is closed. It is made once: this process
// has the well-behaved sender, too.
func fillDisk(ctx context.Context, addr string, source int, ended <-chan struct{}, accepted, refused *atomic.Int64) error {
	body := []byte(`{"batch":[`)
	for i := range 10 {
		if i > 0 {
			body = append(body, ',')
		}
		noise := make([]byte, 12<<10)
		_, _ = rand.Read(noise)
		body = fmt.Appendf(body, `{"type":"track","userId":"u","event":"E","properties":{"x":"%s"}}`, hex.EncodeToString(noise))
	}
	body = append(body, `]}`...)
	for {
		select {
		case <-ended:
			return nil
		default:
		}
		q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/batch", bytes.NewReader(body))
		if err != nil {
			return err
		}
		q.SetBasicAuth(writeKey(source), "")
		resp, err := http.DefaultClient.Do(q)
		if err != nil {
			return err
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			accepted.Add(1)
			continue
		}
		refused.Add(1)
		time.Sleep(10 * time.Millisecond)
	}
}

// sharedPlaces counts the calls that a standby forwards while 1,100 clients without a key send their bodies slowly.
func (b *bench) sharedPlaces(ctx context.Context) ([]row, error) {
	log, err := b.startLog()
	if err != nil {
		return nil, err
	}
	defer log.stop()
	owner, err := b.startWithLog(ctx, destinations(1, b.sink.Addr), b.dir(fmt.Sprint("owner-", time.Now().UnixNano())),
		fmt.Sprintf("%s p%d", log.url, time.Now().UnixNano()))
	if err != nil {
		return nil, err
	}
	defer owner.stop()
	standby, err := b.startStandby(ctx, owner)
	if err != nil {
		return nil, err
	}
	defer standby.stop()
	for range 1100 {
		c, err := net.Dial("tcp", standby.Addr)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		if _, err := io.WriteString(c, "POST /v1/track HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"); err != nil {
			return nil, err
		}
	}
	const calls = 10
	var id atomic.Int64
	forwarded := 0
	for range calls {
		s := newSender(standby)
		if s.send(0, 1, plainID, &id) == nil {
			forwarded++
		}
		s.close()
	}
	return []row{atLeast("calls at a standby beside 1,100 slow bodies", float64(forwarded), calls, fmt.Sprintf("%d of %d", forwarded, calls))},
		nil
}
