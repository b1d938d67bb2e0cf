package standalone

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/kinds"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/why"
	"github.com/posthorn/posthorn/internal/plural"
)

// Prefix is the path of the kinds of posthorn.dev in Handler.
const Prefix = "/apis/posthorn.dev/v1beta1"

// Handler serves the objects read-only, with the paths and formats of a Kubernetes API
// server, so that kubectl and other clients can read them: lists, single objects, and
// tables with the columns of the CRDs. It does not serve Secrets. GET /problems lists the
// problems of the manifests, and POST /discard deletes parked objects.
func (c *Control) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+Prefix+"/{resource}", c.serve)
	mux.HandleFunc("GET "+Prefix+"/{resource}/{name}", c.serve)
	mux.HandleFunc("GET "+Prefix+"/namespaces/{namespace}/{resource}", c.serve)
	mux.HandleFunc("GET "+Prefix+"/namespaces/{namespace}/{resource}/{name}", c.serve)
	mux.HandleFunc("GET "+Prefix, func(w http.ResponseWriter, _ *http.Request) { discover(w) })
	mux.HandleFunc("GET /api", func(w http.ResponseWriter, _ *http.Request) {
		write(w, http.StatusOK, metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{}})
	})
	mux.HandleFunc("GET /apis", func(w http.ResponseWriter, _ *http.Request) {
		version := metav1.GroupVersionForDiscovery{GroupVersion: v1beta1.GroupVersion.String(), Version: v1beta1.GroupVersion.Version}
		write(w, http.StatusOK, metav1.APIGroupList{
			TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"},
			Groups: []metav1.APIGroup{{Name: v1beta1.GroupVersion.Group, Versions: []metav1.GroupVersionForDiscovery{version},
				PreferredVersion: version}},
		})
	})
	mux.HandleFunc("GET /problems", func(w http.ResponseWriter, r *http.Request) {
		c.refresh(r.Context())
		problems, warnings := c.Problems()
		write(w, http.StatusOK, manifest.Problems{Problems: problems, NotAccepted: c.notAccepted(), Warnings: warnings})
	})
	mux.HandleFunc("POST /discard", c.serveDiscard)
	return mux
}

func discover(w http.ResponseWriter) {
	crds, err := definitions()
	if err != nil {
		fail(w, apierrors.NewInternalError(err))
		return
	}
	list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"},
		GroupVersion: v1beta1.GroupVersion.String()}
	for _, k := range kinds.All {
		n := crds[k.Name()].names
		list.APIResources = append(list.APIResources, metav1.APIResource{
			Name: n.Plural, SingularName: n.Singular, Namespaced: true, Kind: n.Kind,
			Verbs: metav1.Verbs{"get", "list"}, ShortNames: n.ShortNames, Categories: n.Categories,
		})
	}
	write(w, http.StatusOK, list)
}

// serve writes a list or an object.
func (c *Control) serve(w http.ResponseWriter, r *http.Request) {
	crds, err := definitions()
	if err != nil {
		fail(w, apierrors.NewInternalError(err))
		return
	}
	namespace, resource, name := r.PathValue("namespace"), r.PathValue("resource"), r.PathValue("name")
	if name != "" && namespace == "" {
		namespace = DefaultNamespace
	}
	query := r.URL.Query()
	if watch := query.Get("watch"); watch != "" && watch != "0" && watch != "false" {
		fail(w, apierrors.NewMethodNotSupported(schema.GroupResource{Group: v1beta1.GroupVersion.Group, Resource: resource}, "watch"))
		return
	}
	selector, err := labels.Parse(query.Get("labelSelector"))
	if err != nil {
		fail(w, apierrors.NewBadRequest("labelSelector: "+err.Error()))
		return
	}
	i := slices.IndexFunc(kinds.All, func(k kinds.Kind) bool { return crds[k.Name()].names.Plural == resource })
	group := schema.GroupResource{Group: v1beta1.GroupVersion.Group, Resource: resource}
	if i < 0 {
		fail(w, apierrors.NewNotFound(group, name))
		return
	}
	kind := kinds.All[i]
	definition := crds[kind.Name()]
	c.refresh(r.Context())
	c.warn(w, kind, namespace)
	var list runtime.Object = c.list(kind, namespace, func(o client.Object) bool {
		return (name == "" || o.GetName() == name) && selector.Matches(labels.Set(o.GetLabels()))
	})
	if name != "" {
		items, err := meta.ExtractList(list)
		if err != nil || len(items) == 0 {
			fail(w, c.notFound(group, id{kind.Name(), namespace, name}))
			return
		}
		list = items[0]
	}
	if !wantsTable(r.Header.Get("Accept")) {
		write(w, http.StatusOK, list)
		return
	}
	table, err := definition.print(r, list, query.Get("includeObject"))
	if err != nil {
		fail(w, apierrors.NewInternalError(err))
		return
	}
	write(w, http.StatusOK, table)
}

// notFound returns the error of an object that does not exist. If its manifest was rejected, the
// error has the reason.
func (c *Control) notFound(group schema.GroupResource, missing id) *apierrors.StatusError {
	err := apierrors.NewNotFound(group, missing.name)
	problems, _ := c.Problems()
	if i := slices.IndexFunc(problems, func(p manifest.Problem) bool { return p.About(missing.String()) }); i >= 0 {
		err.ErrStatus.Message += ": its manifest was rejected: " + problems[i].String()
	}
	return err
}

// maxWarnings bounds the number of problems in the headers of a response.
const maxWarnings = 10

// warn adds the problems of the manifests to a response as Warning headers, which kubectl
// and posthorn get print. A response with Sources also has the requests that reach no Source, and one
// with Sources or destinations the messages of the namespace ("" for all) that will be discarded.
func (c *Control) warn(w http.ResponseWriter, kind kinds.Kind, namespace string) {
	problems, _ := c.Problems()
	for i, p := range problems {
		if i == maxWarnings {
			addWarning(w, plural.Count(len(problems)-i, "more problem")+"; posthorn problems lists all")
			break
		}
		addWarning(w, p.Detail())
	}
	if kind.Name() == kindSource || kind.Name() == kindDestination {
		c.mu.RLock()
		ahead := why.DiscardsAhead(c.configs, namespace, time.Now())
		c.mu.RUnlock()
		for _, text := range ahead[:min(len(ahead), maxWarnings)] {
			addWarning(w, text)
		}
	}
	if kind.Name() == kindSource && c.options.UnknownKeys != nil {
		if text := why.UnknownKeys(c.options.UnknownKeys(), time.Now()); text != "" {
			addWarning(w, text)
		}
	}
}

// addWarning adds a Warning header. The text can have several lines, as errors of the YAML parser do.
func addWarning(w http.ResponseWriter, text string) {
	if header, err := utilnet.NewWarningHeader(299, "posthorn", strings.Join(strings.Fields(text), " ")); err == nil {
		w.Header().Add("Warning", header)
	}
}

// wantsTable reports whether a client prefers a table, as kubectl get does.
func wantsTable(accept string) bool {
	first, _, _ := strings.Cut(accept, ",")
	return strings.Contains(first, "as=Table")
}

// print returns the table that kubectl get prints.
func (d *definition) print(r *http.Request, list runtime.Object, include string) (*metav1.Table, error) {
	table, err := d.table.ConvertToTable(r.Context(), list, nil)
	if err != nil {
		return nil, err
	}
	table.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("Table"))
	for i := range table.Rows {
		object := table.Rows[i].Object.Object
		switch metav1.IncludeObjectPolicy(include) {
		case metav1.IncludeObject:
		case metav1.IncludeNone:
			object = nil
		default:
			m, err := meta.Accessor(object)
			if err != nil {
				return nil, err
			}
			partial := meta.AsPartialObjectMetadata(m)
			partial.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("PartialObjectMetadata"))
			object = partial
		}
		table.Rows[i].Object = runtime.RawExtension{Object: object}
	}
	return table, nil
}

func write(w http.ResponseWriter, code int, object any) {
	body, err := json.Marshal(object)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(body, '\n'))
}

func fail(w http.ResponseWriter, err error) {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		status = apierrors.NewInternalError(err)
	}
	s := status.Status()
	s.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: "Status"})
	write(w, int(s.Code), s)
}
