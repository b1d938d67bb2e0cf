package cli

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/posthorn/posthorn/api/v1beta1"
)

// apiPrefix is the path of Posthorn's kinds, at an API server and at posthorn run.
var apiPrefix = "/apis/" + v1beta1.GroupVersion.String()

// resources is a client of Posthorn's kinds in one namespace. Kinds are given by the plural names
// of their resources.
type resources struct {
	client    rest.Interface
	namespace string
}

func newResources(config *rest.Config, namespace string) (*resources, error) {
	scheme := runtime.NewScheme()
	if err := v1beta1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"}) // Status, of errors
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion = "/apis", &v1beta1.GroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.RESTClientFor(config)
	return &resources{client, namespace}, err
}

func (r *resources) list(ctx context.Context, kind string, into runtime.Object) error {
	return r.do(ctx, r.client.Get().Resource(kind), into)
}

// listJSON returns a list as JSON.
func (r *resources) listJSON(ctx context.Context, kind string) ([]byte, error) {
	result := r.client.Get().Resource(kind).Namespace(r.namespace).Do(ctx)
	// Raw returns no error that is decoded from the body, such as why a request is forbidden.
	if err := result.Error(); err != nil {
		return nil, notInstalled(err)
	}
	return result.Raw()
}

func (r *resources) get(ctx context.Context, kind, name string, into runtime.Object) error {
	return r.do(ctx, r.client.Get().Resource(kind).Name(name), into)
}

func (r *resources) create(ctx context.Context, kind string, o runtime.Object) error {
	return r.do(ctx, r.client.Post().Resource(kind).Body(o), o)
}

func (r *resources) do(ctx context.Context, request *rest.Request, into runtime.Object) error {
	return notInstalled(request.Namespace(r.namespace).Do(ctx).Into(into))
}

// notServed reports whether the cluster does not serve a kind: the path itself does not exist.
func notServed(err error) bool {
	return apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// notInstalled explains the error of a cluster without Posthorn's kinds.
func notInstalled(err error) error {
	if notServed(err) {
		return fmt.Errorf("%w: is Posthorn installed in this cluster? Its CustomResourceDefinitions are not", err)
	}
	return err
}
