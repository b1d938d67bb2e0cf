// Command adapter serves the metrics of pods as the API custom.metrics.k8s.io, for a
// HorizontalPodAutoscaler. It reads /metrics of each pod at the time of a request, as a Prometheus
// with its adapter would do before.
package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/metrics/pkg/apis/custom_metrics"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/cmd"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/provider"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/provider/defaults"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	var base cmd.AdapterBase
	port := base.Flags().String("pod-port", "8081", "port of the pods' metrics")
	if err := base.Flags().Parse(os.Args); err != nil {
		return err
	}
	config, err := base.ClientConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	// The token of the pod's account. The certificates of the pods are for the name of their Service.
	transport, err := rest.HTTPWrappersForConfig(config, &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}})
	if err != nil {
		return err
	}
	base.WithCustomMetrics(&pods{client: client, port: *port, http: &http.Client{Transport: transport, Timeout: 5 * time.Second}})
	return base.Run(context.Background())
}

// pods reads metrics of pods.
type pods struct {
	defaults.DefaultCustomMetricsProvider
	client kubernetes.Interface
	port   string
	http   *http.Client
}

// GetMetricByName implements provider.CustomMetricsProvider.
func (p *pods) GetMetricByName(ctx context.Context, name types.NamespacedName, info provider.CustomMetricInfo,
	_ labels.Selector) (*custom_metrics.MetricValue, error) {
	pod, err := p.client.CoreV1().Pods(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	value, err := p.read(ctx, pod, info.Metric)
	if err != nil {
		return nil, apierrors.NewServiceUnavailable(err.Error())
	}
	return value, nil
}

// GetMetricBySelector implements provider.CustomMetricsProvider. Pods that do not answer have no value.
func (p *pods) GetMetricBySelector(ctx context.Context, namespace string, selector labels.Selector, info provider.CustomMetricInfo,
	_ labels.Selector) (*custom_metrics.MetricValueList, error) {
	list, err := p.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector.String()})
	if err != nil {
		return nil, err
	}
	var values custom_metrics.MetricValueList
	for i := range list.Items {
		if value, err := p.read(ctx, &list.Items[i], info.Metric); err == nil {
			values.Items = append(values.Items, *value)
		} else {
			fmt.Fprintf(os.Stderr, "pod %s: %v\n", list.Items[i].Name, err)
		}
	}
	return &values, nil
}

// read returns the largest value of a gauge of a pod.
func (p *pods) read(ctx context.Context, pod *corev1.Pod, metric string) (*custom_metrics.MetricValue, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+net.JoinHostPort(pod.Status.PodIP, p.port)+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	answer, err := p.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET /metrics: %s", answer.Status)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	if err != nil {
		return nil, err
	}
	series := families[metric].GetMetric()
	if len(series) == 0 {
		return nil, fmt.Errorf("GET /metrics: no metric %s", metric)
	}
	largest := series[0].GetGauge().GetValue()
	for _, s := range series {
		largest = max(largest, s.GetGauge().GetValue())
	}
	return &custom_metrics.MetricValue{
		DescribedObject: custom_metrics.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name},
		Metric:          custom_metrics.MetricIdentifier{Name: metric},
		Timestamp:       metav1.Now(),
		Value:           *resource.NewMilliQuantity(int64(largest*1000), resource.DecimalSI),
	}, nil
}
