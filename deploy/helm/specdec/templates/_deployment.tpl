{{/*
The Deployment of one tier. Takes a dict:
  root            the chart's context
  tier            orchestrator, target or draft
  module          the Python module that is run
  port            of gRPC
  metricsPort     of the metrics
  values          the tier's values
  flags           the tier's own flags, a list
  startupSeconds  longest time until it serves
*/}}
{{- define "specdec.deployment" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $gpus := int ($values.gpus | default 0) -}}
{{- $preStopSeconds := 5 -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "specdec.name" . }}
  labels:
    {{- include "specdec.labels" . | nindent 4 }}
spec:
  {{- if not (kindIs "invalid" $values.replicas) }}
  replicas: {{ $values.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "specdec.selectorLabels" . | nindent 6 }}
  {{- with $values.strategy }}
  strategy:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  template:
    metadata:
      labels:
        {{- include "specdec.labels" . | nindent 8 }}
      {{- $annotations := dict }}
      {{- if $root.Values.scrapeAnnotations }}
      {{- $annotations = dict "prometheus.io/scrape" "true" "prometheus.io/port" (toString .metricsPort) "prometheus.io/path" "/metrics" }}
      {{- end }}
      {{- with merge (deepCopy $values.podAnnotations) $annotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      automountServiceAccountToken: false
      # Else a Service named NAME-target puts NAME_TARGET_PORT into every pod, which
      # for a release named specdec is a setting of ours.
      enableServiceLinks: false
      # Longer than what comes before the end: preStop, the drain, and the export of spans.
      terminationGracePeriodSeconds: {{ add $preStopSeconds $values.drainGraceSeconds 15 }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . }}
        {{- end }}
      {{- end }}
      {{- with $values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $values.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      containers:
        - name: {{ .tier }}
          image: "{{ $root.Values.image.repository }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}"
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [python, -m, {{ .module }}]
          args:
            - --host=0.0.0.0
            - --port={{ .port }}
            - --metrics-port={{ .metricsPort }}
            - --drain-grace-ms={{ mul $values.drainGraceSeconds 1000 }}
            {{- if $gpus }}
            - --device=cuda
            {{- end }}
            {{- range concat .flags $values.args }}
            - {{ . | quote }}
            {{- end }}
          env:
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            # Tells the pods of a tier apart in traces.
            - name: OTEL_RESOURCE_ATTRIBUTES
              value: k8s.namespace.name={{ $root.Release.Namespace }},k8s.pod.name=$(POD_NAME)
            {{- with $root.Values.otlpEndpoint }}
            - name: OTEL_EXPORTER_OTLP_ENDPOINT
              value: {{ . | quote }}
            {{- end }}
            {{- with $values.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - name: grpc
              containerPort: {{ .port }}
            - name: metrics
              containerPort: {{ .metricsPort }}
          # Loading takes minutes; until it is over, the other probes wait.
          startupProbe:
            grpc:
              port: {{ .port }}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: {{ div (add .startupSeconds 4) 5 }}
          readinessProbe:
            grpc:
              port: {{ .port }}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          # Patient: a pod that is killed loses its KV.
          livenessProbe:
            grpc:
              port: {{ .port }}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          lifecycle:
            # The pod leaves the name's addresses first, and refuses new work after that.
            preStop:
              exec:
                command: [sleep, {{ $preStopSeconds | quote }}]
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
          resources:
            {{- $resources := deepCopy $values.resources }}
            {{- if $gpus }}
            {{- $limits := merge (dict $values.gpuResource $gpus) ($resources.limits | default dict) }}
            {{- $_ := set $resources "limits" $limits }}
            {{- end }}
            {{- toYaml $resources | nindent 12 }}
          volumeMounts:
            - name: cache
              mountPath: /cache
            - name: tmp
              mountPath: /tmp
            {{- with $values.volumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: cache
          {{- if $root.Values.cache.existingClaim }}
          persistentVolumeClaim:
            claimName: {{ $root.Values.cache.existingClaim }}
          {{- else if $root.Values.cache.sizeLimit }}
          emptyDir:
            sizeLimit: {{ $root.Values.cache.sizeLimit }}
          {{- else }}
          emptyDir: {}
          {{- end }}
        - name: tmp
          emptyDir: {}
        {{- with $values.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
{{- end }}

{{/* The PodDisruptionBudget of one tier, if it has one. */}}
{{- define "specdec.podDisruptionBudget" -}}
{{- with .values.podDisruptionBudget }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "specdec.name" $ }}
  labels:
    {{- include "specdec.labels" $ | nindent 4 }}
spec:
  selector:
    matchLabels:
      {{- include "specdec.selectorLabels" $ | nindent 6 }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The headless Service of one tier: its name's addresses are the pods that are ready. The
orchestrator connects to each and places the work itself.
*/}}
{{- define "specdec.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "specdec.name" . }}
  labels:
    {{- include "specdec.labels" . | nindent 4 }}
spec:
  clusterIP: None
  selector:
    {{- include "specdec.selectorLabels" . | nindent 4 }}
  ports:
    - name: grpc
      port: {{ .port }}
      targetPort: grpc
      appProtocol: kubernetes.io/h2c
{{- end }}

{{/* Lets only the orchestrator's pods call a tier; its metrics are for anybody. */}}
{{- define "specdec.networkPolicy" -}}
{{- if .root.Values.networkPolicy }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "specdec.name" . }}
  labels:
    {{- include "specdec.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "specdec.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              {{- include "specdec.selectorLabels" (dict "root" .root "tier" "orchestrator") | nindent 14 }}
      ports:
        - port: grpc
    - ports:
        - port: metrics
{{- end }}
{{- end }}
