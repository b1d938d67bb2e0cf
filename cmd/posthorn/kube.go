package main

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"

	"github.com/go-logr/logr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// logStart logs the start of a server and its memory limit in bytes.
func logStart(log *slog.Logger, memoryLimit int64) {
	log.Info("starting posthorn", "version", command.Version, "memoryLimit", memoryLimit)
}

// bridgeLogs sends the logs of the Kubernetes libraries to the handler. Only the first call has an
// effect, because the libraries may already use that handler.
func bridgeLogs(handler slog.Handler) {
	bridged.Do(func() {
		logger := logr.FromSlogHandler(handler)
		klog.SetLogger(logger)
		ctrl.SetLogger(logger)
	})
}

var bridged sync.Once

func restConfig(kubeconfig string) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("cannot connect to a cluster: %w; run in a pod, or set --kubeconfig or KUBECONFIG", err)
	}
	config.UserAgent = "posthorn/" + strings.ReplaceAll(command.BuildVersion(), " ", "-")
	return config, nil
}

func kubeClient(kubeconfig string) (kubernetes.Interface, error) {
	config, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}
