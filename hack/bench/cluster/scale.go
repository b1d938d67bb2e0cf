package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/test/process"
)

// The durations of the phases of scale.
const (
	phase      = 30 * time.Second
	podAbsence = time.Second
)

// scale measures the operator with a fleet of simulated pods.
func (w *world) scale(ctx context.Context) error {
	_, port, _ := net.SplitHostPort(process.FreeAddr())
	fleet := newFleet(*simulatedPods, port)
	// The admin server of each pod has a config before the operator asks it.
	unlimited := rest.CopyConfig(w.server.Config)
	unlimited.QPS = -1
	clientset, err := kubernetes.NewForConfig(unlimited)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	defer func() { stop(); _ = group.Wait() }()
	begin := time.Now()
	if err := w.apply(ctx); err != nil {
		return err
	}
	row("creation of all objects", ms(time.Since(begin)), "", true)
	for _, p := range fleet.pods {
		if err := errors.Join(p.start(), w.makePod(ctx, p.name, p.ip)); err != nil {
			return err
		}
		defer p.stop()
	}
	group.Go(func() error { return fleet.watch(ctx, clientset) })
	asOperator, err := w.kubeconfig("posthorn-operator")
	if err != nil {
		return err
	}
	startOperator := func() error { return w.startOperator(asOperator, port, "") }
	begin = time.Now()
	if err := startOperator(); err != nil {
		return err
	}
	if err := w.waitReady(ctx); err != nil {
		return err
	}
	row("start of the operator to every object Ready", ms(time.Since(begin)), "", true)
	if err := w.quiet(ctx); err != nil {
		return err
	}

	idle := func() error { return sleep(ctx, phase) }
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"idle", idle},
		{"rolling update", func() error { return w.roll(ctx, fleet) }},
		{"a silent pod", func() error {
			fleet.pods[0].silent.Store(true)
			defer fleet.pods[0].silent.Store(false)
			return idle()
		}},
		{"restart of the operator", func() error {
			if err := w.processes["operator"].Stop(syscall.SIGTERM); err != nil {
				return err
			}
			return errors.Join(startOperator(), idle())
		}},
	} {
		all, err := w.measured(step.name, step.do)
		if err != nil {
			return err
		}
		row(step.name+": statuses written", strconv.Itoa(all["status"]), "0", all["status"] == 0)
	}
	return w.underTraffic(ctx, group, fleet)
}

// underTraffic measures with a delivery of every destination and pod a second.
func (w *world) underTraffic(ctx context.Context, group *errgroup.Group, fleet *fleet) error {
	group.Go(func() error {
		for every := time.NewTicker(time.Second); ; {
			select {
			case <-ctx.Done():
				return nil
			case <-every.C:
				fleet.deliver()
			}
		}
	})
	all, err := w.measured("first traffic of all", func() error { return sleep(ctx, 4*phase) })
	if err != nil {
		return err
	}
	row("first traffic of all: statuses written", strconv.Itoa(all["status"]), "", true)
	// On a busy machine the transitions take longer than their budget permits.
	for range 10 {
		begin := time.Now()
		if err := sleep(ctx, phase); err != nil {
			return err
		}
		if all, err = w.written(begin); err != nil {
			return err
		}
		if float64(all["status"]) <= 1.1*20*phase.Seconds() {
			break
		}
	}
	begin := time.Now()
	all, err = w.measured("traffic", func() error { return sleep(ctx, 2*phase) })
	if err != nil {
		return err
	}
	rate := float64(all["status"]) / time.Since(begin).Seconds()
	row("traffic: statuses written per second", fmt.Sprintf("%.1f", rate), "<= 20", rate <= 20)
	var shown []time.Duration
	for i := range *writes {
		d, err := w.edit(ctx, w.namespace(i), i/(*namespaces), fmt.Sprintf("scale-%d", i))
		if err != nil {
			return err
		}
		shown = append(shown, d)
	}
	row("traffic: edit to Ready, p50 / p99", quantiles(shown), "p99 < 3 s", quantile(shown, 0.99) < 3*time.Second)
	size, err := w.storageBytes()
	if err != nil {
		return err
	}
	row("size of etcd", fmt.Sprintf("%d MB", size>>20), "", true)
	return nil
}

// measured runs a phase, prints the operator's CPU and memory, and returns the writes.
func (w *world) measured(name string, do func() error) (tally, error) {
	operator := w.processes["operator"]
	begin, cpu := time.Now(), process.CPU(operator.Pid())
	if err := do(); err != nil {
		return nil, err
	}
	now, peak := process.Memory(operator.Pid())
	cores := (process.CPU(operator.Pid()) - cpu).Seconds() / time.Since(begin).Seconds()
	if cores >= 0 { // A restarted process has begun at 0.
		row(name+": operator", fmt.Sprintf("%.2f cores, %d MB, at most %d MB", cores, now>>20, peak>>20), "0.5, 400",
			cores <= 0.5 && peak>>20 <= 400)
	}
	return w.written(begin)
}

// roll restarts every pod of the fleet, one after another.
func (w *world) roll(ctx context.Context, f *fleet) error {
	for _, p := range f.pods {
		p.stop()
		if err := w.setReady(ctx, p.name, corev1.ConditionFalse); err != nil {
			return err
		}
		if err := sleep(ctx, podAbsence); err != nil {
			return err
		}
		if err := errors.Join(p.start(), w.setReady(ctx, p.name, corev1.ConditionTrue)); err != nil {
			return err
		}
	}
	return sleep(ctx, 5*time.Second)
}

func (w *world) setReady(ctx context.Context, pod string, ready corev1.ConditionStatus) error {
	body := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q}]}}`, ready)
	o := &corev1.Pod{}
	o.Namespace, o.Name = release, pod
	return w.client.Status().Patch(ctx, o, client.RawPatch(types.StrategicMergePatchType, []byte(body)))
}

// storageBytes is the size of etcd's database.
func (w *world) storageBytes() (int64, error) {
	text, err := w.server.Kubectl("", "get", "--raw", "/metrics")
	if err != nil {
		return 0, err
	}
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), "apiserver_storage_size_bytes"); ok {
			_, value, _ = strings.Cut(value, "} ")
			size, err := strconv.ParseFloat(value, 64)
			return int64(size), err
		}
	}
	return 0, errors.New("the API server does not report the size of etcd")
}
