// Command cluster measures operator and dispatchers, each a process with its permissions of
// config/, with a real kube-apiserver and etcd (with fsync) that have 1,000 destinations in
// 50 namespaces:
//
//	go run ./hack/bench/cluster
//
// With simulated pods it measures the operator alone, which asks them for reports and writes
// statuses:
//
//	go run ./hack/bench/cluster -simulated 50 -destinations 200
//
// It needs the binaries of hack/envtest-assets. It counts writes in the API server's audit
// log, and changes by their effect: a delivery of every pod with the new header or the
// signature of the new secret.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"
)

var (
	namespaces    = flag.Int("namespaces", 50, "namespaces; each has a Source")
	perNamespace  = flag.Int("destinations", 20, "destinations in each namespace; each has a Secret")
	dispatchers   = flag.Int("dispatchers", 3, "dispatcher processes")
	simulatedPods = flag.Int("simulated", 0, "dispatcher pods that are simulated, without a store and deliveries; then there are no dispatcher processes")
	changeCount   = flag.Int("changes", 200, "changes whose time to effect is measured: headers and secrets in turn")
	writes        = flag.Int("writes", 50, "changes whose API writes are counted, without traffic")
	idle          = flag.Duration("idle", 3*time.Minute, "duration for which writes are counted without changes")
	ballast       = flag.Int("ballast", 100, "unused Secrets of 1,000 KiB, added after the idle time")
	keepLogs      = flag.String("logs", "", "directory for the processes' logs; default: none")
)

func main() {
	flag.Parse()
	ctrl.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// settled is the time without writes after which the cluster is quiet. It is longer than the
// interval in which the operator writes numbers to a status.
const settled = 35 * time.Second

func run(ctx context.Context) (err error) {
	w, err := newWorld()
	if err != nil {
		return err
	}
	defer w.close()
	fmt.Printf("%d CPUs, %s, %s; %d destinations in %d namespaces, %d dispatchers\n",
		runtime.NumCPU(), runtime.GOOS, runtime.Version(), *namespaces**perNamespace, *namespaces, max(*dispatchers, *simulatedPods))
	fmt.Printf("%-58s %30s   %s\n", "figure", "measured", "goal")
	if *simulatedPods > 0 {
		return w.scale(ctx)
	}

	if err := w.apply(ctx); err != nil {
		return err
	}
	begin := time.Now()
	if err := w.startProcesses(ctx); err != nil {
		return err
	}
	if err := w.waitReady(ctx); err != nil {
		return err
	}
	row("start of all processes to every object Ready", ms(time.Since(begin)), "", true)
	if err := w.quiet(ctx); err != nil {
		return err
	}
	all, err := w.written(begin)
	if err != nil {
		return err
	}
	row("writes at the start", all.String(), "", true)
	w.memory("after the start")

	begin = time.Now()
	cpu := w.cpu()
	if err := sleep(ctx, *idle); err != nil {
		return err
	}
	took := time.Since(begin)
	if all, err = w.written(begin); err != nil {
		return err
	}
	row(fmt.Sprintf("writes in %v of idleness", *idle), all.String(), "none", all.objects() == 0)
	row("  renewals of the operator's Lease, per hour", fmt.Sprintf("%.0f", float64(all["leases"])/took.Hours()), "", true)
	row("  access reviews (not stored), per hour", fmt.Sprintf("%.0f", float64(all["reviews"])/took.Hours()), "", true)
	for name, used := range w.cpu() {
		row("  CPU of "+name, fmt.Sprintf("%.2f %% of a core", 100*(used-cpu[name]).Seconds()/took.Seconds()), "", true)
	}

	if err := w.addBallast(ctx); err != nil {
		return err
	}
	w.memory(fmt.Sprintf("with %d MB more of Secrets", *ballast))

	// Without traffic all writes belong to the change.
	begin = time.Now()
	var shown []time.Duration
	for i := range *writes {
		d, err := w.edit(ctx, w.namespace(i), i/(*namespaces), fmt.Sprintf("quiet-%d", i))
		if err != nil {
			return err
		}
		shown = append(shown, d)
	}
	if err := w.quiet(ctx); err != nil {
		return err
	}
	if all, err = w.written(begin); err != nil {
		return err
	}
	each := func(n int) float64 { return float64(n) / float64(*writes) }
	row("live-config Secrets written per change", fmt.Sprintf("%.2f", each(all["secrets"])), "1", all["secrets"] == *writes)
	row("statuses written per change", fmt.Sprintf("%.2f", each(all["status"])), "1", all["status"] == *writes)
	row("other writes per change", fmt.Sprintf("%.2f", each(all.objects()-all["secrets"]-all["status"])), "0",
		all.objects() == all["secrets"]+all["status"])
	row("apply to Ready in status, p50 / p99", quantiles(shown), "", true)

	var took1, took2 []time.Duration
	for i := range *changeCount {
		d, err := w.change(ctx, i)
		if err != nil {
			return err
		}
		if i%2 == 0 {
			took1 = append(took1, d)
		} else {
			took2 = append(took2, d)
		}
	}
	both := slices.Concat(took1, took2)
	row("apply to effect on every pod, p50 / p99", quantiles(both), "p99 < 1 s", quantile(both, 0.99) < time.Second)
	row("  of a header", quantiles(took1), "", true)
	row("  of a signing secret", quantiles(took2), "", true)
	w.memory("at the end")
	return nil
}

// row prints one line of the result.
func row(name, value, goal string, met bool) {
	mark := ""
	switch {
	case goal == "":
	case met:
		mark = "met"
	default:
		mark = "NOT MET"
	}
	fmt.Println(strings.TrimRight(fmt.Sprintf("%-58s %30s   %-10s %s", name, value, goal, mark), " "))
}

func ms(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }

func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(d))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func quantiles(d []time.Duration) string {
	return ms(quantile(d, 0.5)) + " / " + ms(quantile(d, 0.99))
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
