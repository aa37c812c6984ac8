//! Functions of MPI that are not served. MPItrampoline looks for all names of MPI 3.1 when a program starts, and ends the program if one
//! is missing.

use std::ffi::c_int;

use super::calls::refused;

/// Functions that return an error code.
macro_rules! refused {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            refused(stringify!($name))
        }
    )*};
}

/// Functions that return something else: nothing tells their callers that they are not there.
macro_rules! fatal {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> usize {
            eprintln!("mccs: {} is not served", stringify!($name));
            std::process::abort()
        }
    )*};
}

/// Constants, of values that no served call takes.
macro_rules! constants {
    ($kind:ty = $value:literal; $($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        static $name: $kind = $value;
    )*};
}

refused! {
    MPIABI_Abort MPIABI_Accumulate MPIABI_Add_error_class MPIABI_Add_error_code MPIABI_Add_error_string MPIABI_Allgatherv
    MPIABI_Alloc_mem MPIABI_Alltoall MPIABI_Alltoallv MPIABI_Alltoallw MPIABI_Barrier MPIABI_Bcast MPIABI_Bsend
    MPIABI_Bsend_init MPIABI_Buffer_attach MPIABI_Buffer_detach MPIABI_Cancel MPIABI_Cart_coords MPIABI_Cart_create
    MPIABI_Cart_get MPIABI_Cart_map MPIABI_Cart_rank MPIABI_Cart_shift MPIABI_Cart_sub MPIABI_Cartdim_get MPIABI_Close_port
    MPIABI_Comm_accept MPIABI_Comm_call_errhandler MPIABI_Comm_compare MPIABI_Comm_connect MPIABI_Comm_create
    MPIABI_Comm_create_errhandler MPIABI_Comm_create_group MPIABI_Comm_create_keyval MPIABI_Comm_delete_attr
    MPIABI_Comm_disconnect MPIABI_Comm_dup MPIABI_Comm_dup_with_info MPIABI_Comm_free_keyval MPIABI_Comm_get_attr
    MPIABI_Comm_get_errhandler MPIABI_Comm_get_info MPIABI_Comm_get_name MPIABI_Comm_get_parent MPIABI_Comm_group
    MPIABI_Comm_idup MPIABI_Comm_join MPIABI_Comm_remote_group MPIABI_Comm_remote_size MPIABI_Comm_set_attr
    MPIABI_Comm_set_errhandler MPIABI_Comm_set_info MPIABI_Comm_set_name MPIABI_Comm_spawn MPIABI_Comm_spawn_multiple
    MPIABI_Comm_split_type MPIABI_Comm_test_inter MPIABI_Compare_and_swap MPIABI_Dims_create MPIABI_Dist_graph_create
    MPIABI_Dist_graph_create_adjacent MPIABI_Dist_graph_neighbors MPIABI_Dist_graph_neighbors_count MPIABI_Errhandler_free
    MPIABI_Error_class MPIABI_Exscan MPIABI_Fetch_and_op MPIABI_File_call_errhandler MPIABI_File_close
    MPIABI_File_create_errhandler MPIABI_File_delete MPIABI_File_get_amode MPIABI_File_get_atomicity MPIABI_File_get_byte_offset
    MPIABI_File_get_errhandler MPIABI_File_get_group MPIABI_File_get_info MPIABI_File_get_position
    MPIABI_File_get_position_shared MPIABI_File_get_size MPIABI_File_get_type_extent MPIABI_File_get_view MPIABI_File_iread
    MPIABI_File_iread_all MPIABI_File_iread_at MPIABI_File_iread_at_all MPIABI_File_iread_shared MPIABI_File_iwrite
    MPIABI_File_iwrite_all MPIABI_File_iwrite_at MPIABI_File_iwrite_at_all MPIABI_File_iwrite_shared MPIABI_File_open
    MPIABI_File_preallocate MPIABI_File_read MPIABI_File_read_all MPIABI_File_read_all_begin MPIABI_File_read_all_end
    MPIABI_File_read_at MPIABI_File_read_at_all MPIABI_File_read_at_all_begin MPIABI_File_read_at_all_end
    MPIABI_File_read_ordered MPIABI_File_read_ordered_begin MPIABI_File_read_ordered_end MPIABI_File_read_shared
    MPIABI_File_seek MPIABI_File_seek_shared MPIABI_File_set_atomicity MPIABI_File_set_errhandler MPIABI_File_set_info
    MPIABI_File_set_size MPIABI_File_set_view MPIABI_File_sync MPIABI_File_write MPIABI_File_write_all
    MPIABI_File_write_all_begin MPIABI_File_write_all_end MPIABI_File_write_at MPIABI_File_write_at_all
    MPIABI_File_write_at_all_begin MPIABI_File_write_at_all_end MPIABI_File_write_ordered MPIABI_File_write_ordered_begin
    MPIABI_File_write_ordered_end MPIABI_File_write_shared MPIABI_Finalized MPIABI_Free_mem MPIABI_Gather MPIABI_Gatherv
    MPIABI_Get MPIABI_Get_accumulate MPIABI_Get_address MPIABI_Get_count MPIABI_Get_elements MPIABI_Get_elements_x
    MPIABI_Get_library_version MPIABI_Get_processor_name MPIABI_Get_version MPIABI_Graph_create MPIABI_Graph_get
    MPIABI_Graph_map MPIABI_Graph_neighbors MPIABI_Graph_neighbors_count MPIABI_Graphdims_get MPIABI_Grequest_complete
    MPIABI_Grequest_start MPIABI_Group_compare MPIABI_Group_difference MPIABI_Group_excl MPIABI_Group_free MPIABI_Group_incl
    MPIABI_Group_intersection MPIABI_Group_range_excl MPIABI_Group_range_incl MPIABI_Group_rank MPIABI_Group_size
    MPIABI_Group_translate_ranks MPIABI_Group_union MPIABI_Iallgather MPIABI_Iallgatherv MPIABI_Iallreduce MPIABI_Ialltoall
    MPIABI_Ialltoallv MPIABI_Ialltoallw MPIABI_Ibarrier MPIABI_Ibcast MPIABI_Ibsend MPIABI_Iexscan MPIABI_Igather
    MPIABI_Igatherv MPIABI_Improbe MPIABI_Imrecv MPIABI_Ineighbor_allgather MPIABI_Ineighbor_allgatherv
    MPIABI_Ineighbor_alltoall MPIABI_Ineighbor_alltoallv MPIABI_Ineighbor_alltoallw MPIABI_Info_create MPIABI_Info_delete
    MPIABI_Info_dup MPIABI_Info_free MPIABI_Info_get MPIABI_Info_get_nkeys MPIABI_Info_get_nthkey MPIABI_Info_get_valuelen
    MPIABI_Info_set MPIABI_Init MPIABI_Initialized MPIABI_Intercomm_create MPIABI_Intercomm_merge MPIABI_Iprobe MPIABI_Ireduce
    MPIABI_Ireduce_scatter MPIABI_Ireduce_scatter_block MPIABI_Irsend MPIABI_Iscan MPIABI_Iscatter MPIABI_Iscatterv
    MPIABI_Issend MPIABI_Lookup_name MPIABI_Mprobe MPIABI_Mrecv MPIABI_Neighbor_allgather MPIABI_Neighbor_allgatherv
    MPIABI_Neighbor_alltoall MPIABI_Neighbor_alltoallv MPIABI_Neighbor_alltoallw MPIABI_Op_commutative MPIABI_Op_create
    MPIABI_Op_free MPIABI_Open_port MPIABI_Pack MPIABI_Pack_external MPIABI_Pack_external_size MPIABI_Pack_size MPIABI_Probe
    MPIABI_Publish_name MPIABI_Put MPIABI_Query_thread MPIABI_Raccumulate MPIABI_Recv MPIABI_Recv_init MPIABI_Reduce
    MPIABI_Reduce_local MPIABI_Reduce_scatter_block MPIABI_Register_datarep MPIABI_Request_free MPIABI_Request_get_status
    MPIABI_Rget MPIABI_Rget_accumulate MPIABI_Rput MPIABI_Rsend MPIABI_Rsend_init MPIABI_Scan MPIABI_Scatter MPIABI_Scatterv
    MPIABI_Send MPIABI_Send_init MPIABI_Sendrecv_replace MPIABI_Ssend MPIABI_Ssend_init MPIABI_Start MPIABI_Startall
    MPIABI_Status_c2f MPIABI_Status_f2c MPIABI_Status_set_cancelled MPIABI_Status_set_elements MPIABI_Status_set_elements_x
    MPIABI_Test MPIABI_Test_cancelled MPIABI_Testall MPIABI_Testany MPIABI_Testsome MPIABI_Topo_test MPIABI_Type_commit
    MPIABI_Type_contiguous MPIABI_Type_create_darray MPIABI_Type_create_f90_complex MPIABI_Type_create_f90_integer
    MPIABI_Type_create_f90_real MPIABI_Type_create_hindexed MPIABI_Type_create_hindexed_block MPIABI_Type_create_hvector
    MPIABI_Type_create_indexed_block MPIABI_Type_create_keyval MPIABI_Type_create_resized MPIABI_Type_create_struct
    MPIABI_Type_create_subarray MPIABI_Type_delete_attr MPIABI_Type_dup MPIABI_Type_free MPIABI_Type_free_keyval
    MPIABI_Type_get_attr MPIABI_Type_get_contents MPIABI_Type_get_envelope MPIABI_Type_get_extent MPIABI_Type_get_extent_x
    MPIABI_Type_get_name MPIABI_Type_get_true_extent MPIABI_Type_get_true_extent_x MPIABI_Type_indexed MPIABI_Type_match_size
    MPIABI_Type_set_attr MPIABI_Type_set_name MPIABI_Type_size MPIABI_Type_size_x MPIABI_Type_struct MPIABI_Type_vector
    MPIABI_Unpack MPIABI_Unpack_external MPIABI_Unpublish_name MPIABI_Waitall MPIABI_Waitany MPIABI_Waitsome MPIABI_Win_allocate
    MPIABI_Win_allocate_shared MPIABI_Win_attach MPIABI_Win_call_errhandler MPIABI_Win_complete MPIABI_Win_create
    MPIABI_Win_create_dynamic MPIABI_Win_create_errhandler MPIABI_Win_create_keyval MPIABI_Win_delete_attr MPIABI_Win_detach
    MPIABI_Win_fence MPIABI_Win_flush MPIABI_Win_flush_all MPIABI_Win_flush_local MPIABI_Win_flush_local_all MPIABI_Win_free
    MPIABI_Win_free_keyval MPIABI_Win_get_attr MPIABI_Win_get_errhandler MPIABI_Win_get_group MPIABI_Win_get_info
    MPIABI_Win_get_name MPIABI_Win_lock MPIABI_Win_lock_all MPIABI_Win_post MPIABI_Win_set_attr MPIABI_Win_set_errhandler
    MPIABI_Win_set_info MPIABI_Win_set_name MPIABI_Win_shared_query MPIABI_Win_start MPIABI_Win_sync MPIABI_Win_test
    MPIABI_Win_unlock MPIABI_Win_unlock_all MPIABI_Win_wait MPIXABI_Query_cuda_support MPIXABI_Query_hip_support
    MPIXABI_Query_rocm_support MPIXABI_Query_ze_support
}

fatal! {
    MPIABI_Aint_add MPIABI_Aint_diff MPIABI_Comm_c2f MPIABI_Comm_f2c MPIABI_Errhandler_c2f MPIABI_Errhandler_f2c MPIABI_File_c2f
    MPIABI_File_f2c MPIABI_Group_c2f MPIABI_Group_f2c MPIABI_Info_c2f MPIABI_Info_f2c MPIABI_Message_c2f MPIABI_Message_f2c
    MPIABI_Op_c2f MPIABI_Op_f2c MPIABI_Request_c2f MPIABI_Request_f2c MPIABI_Type_c2f MPIABI_Type_f2c MPIABI_Win_c2f
    MPIABI_Win_f2c MPIABI_Wtick MPIABI_Wtime
}

constants! {
    c_int = -1;
    MPIABI_ANY_SOURCE MPIABI_ANY_TAG MPIABI_APPNUM MPIABI_BSEND_OVERHEAD MPIABI_CART MPIABI_COMBINER_CONTIGUOUS
    MPIABI_COMBINER_DARRAY MPIABI_COMBINER_DUP MPIABI_COMBINER_F90_COMPLEX MPIABI_COMBINER_F90_INTEGER MPIABI_COMBINER_F90_REAL
    MPIABI_COMBINER_HINDEXED MPIABI_COMBINER_HINDEXED_BLOCK MPIABI_COMBINER_HVECTOR MPIABI_COMBINER_INDEXED
    MPIABI_COMBINER_INDEXED_BLOCK MPIABI_COMBINER_NAMED MPIABI_COMBINER_RESIZED MPIABI_COMBINER_STRUCT MPIABI_COMBINER_SUBARRAY
    MPIABI_COMBINER_VECTOR MPIABI_COMM_TYPE_SHARED MPIABI_CONGRUENT MPIABI_DISTRIBUTE_BLOCK MPIABI_DISTRIBUTE_CYCLIC
    MPIABI_DISTRIBUTE_DFLT_DARG MPIABI_DISTRIBUTE_NONE MPIABI_DIST_GRAPH MPIABI_ERR_ACCESS MPIABI_ERR_AMODE MPIABI_ERR_ARG
    MPIABI_ERR_ASSERT MPIABI_ERR_BAD_FILE MPIABI_ERR_BASE MPIABI_ERR_BUFFER MPIABI_ERR_COMM MPIABI_ERR_CONVERSION
    MPIABI_ERR_COUNT MPIABI_ERR_DIMS MPIABI_ERR_DISP MPIABI_ERR_DUP_DATAREP MPIABI_ERR_FILE MPIABI_ERR_FILE_EXISTS
    MPIABI_ERR_FILE_IN_USE MPIABI_ERR_GROUP MPIABI_ERR_INFO MPIABI_ERR_INFO_KEY MPIABI_ERR_INFO_NOKEY MPIABI_ERR_INFO_VALUE
    MPIABI_ERR_INTERN MPIABI_ERR_IN_STATUS MPIABI_ERR_IO MPIABI_ERR_KEYVAL MPIABI_ERR_LASTCODE MPIABI_ERR_LOCKTYPE
    MPIABI_ERR_NAME MPIABI_ERR_NOT_SAME MPIABI_ERR_NO_MEM MPIABI_ERR_NO_SPACE MPIABI_ERR_NO_SUCH_FILE MPIABI_ERR_OP
    MPIABI_ERR_OTHER MPIABI_ERR_PENDING MPIABI_ERR_PORT MPIABI_ERR_QUOTA MPIABI_ERR_RANK MPIABI_ERR_READ_ONLY MPIABI_ERR_REQUEST
    MPIABI_ERR_RMA_ATTACH MPIABI_ERR_RMA_CONFLICT MPIABI_ERR_RMA_FLAVOR MPIABI_ERR_RMA_RANGE MPIABI_ERR_RMA_SHARED
    MPIABI_ERR_RMA_SYNC MPIABI_ERR_ROOT MPIABI_ERR_SERVICE MPIABI_ERR_SIZE MPIABI_ERR_SPAWN MPIABI_ERR_TAG MPIABI_ERR_TOPOLOGY
    MPIABI_ERR_TRUNCATE MPIABI_ERR_TYPE MPIABI_ERR_UNKNOWN MPIABI_ERR_UNSUPPORTED_DATAREP MPIABI_ERR_UNSUPPORTED_OPERATION
    MPIABI_ERR_WIN MPIABI_GRAPH MPIABI_HOST MPIABI_IDENT MPIABI_IO MPIABI_KEYVAL_INVALID MPIABI_LASTUSEDCODE
    MPIABI_LOCK_EXCLUSIVE MPIABI_LOCK_SHARED MPIABI_MODE_APPEND MPIABI_MODE_CREATE MPIABI_MODE_DELETE_ON_CLOSE MPIABI_MODE_EXCL
    MPIABI_MODE_NOCHECK MPIABI_MODE_NOPRECEDE MPIABI_MODE_NOPUT MPIABI_MODE_NOSTORE MPIABI_MODE_NOSUCCEED MPIABI_MODE_RDONLY
    MPIABI_MODE_RDWR MPIABI_MODE_SEQUENTIAL MPIABI_MODE_UNIQUE_OPEN MPIABI_MODE_WRONLY MPIABI_ORDER_C MPIABI_ORDER_FORTRAN
    MPIABI_PROC_NULL MPIABI_ROOT MPIABI_SEEK_CUR MPIABI_SEEK_END MPIABI_SEEK_SET MPIABI_SIMILAR MPIABI_TAG_UB
    MPIABI_TYPECLASS_COMPLEX MPIABI_TYPECLASS_INTEGER MPIABI_TYPECLASS_REAL MPIABI_UNEQUAL MPIABI_UNIVERSE_SIZE MPIABI_WIN_BASE
    MPIABI_WIN_CREATE_FLAVOR MPIABI_WIN_DISP_UNIT MPIABI_WIN_FLAVOR_ALLOCATE MPIABI_WIN_FLAVOR_CREATE MPIABI_WIN_FLAVOR_DYNAMIC
    MPIABI_WIN_FLAVOR_SHARED MPIABI_WIN_MODEL MPIABI_WIN_SEPARATE MPIABI_WIN_SIZE MPIABI_WIN_UNIFIED MPIABI_WTIME_IS_GLOBAL
}

// Handles and pointers.
constants! {
    usize = 0;
    MPIABI_2DOUBLE_PRECISION MPIABI_2INT MPIABI_2INTEGER MPIABI_2REAL MPIABI_AINT MPIABI_ARGVS_NULL MPIABI_ARGV_NULL MPIABI_BAND
    MPIABI_BOR MPIABI_BOTTOM MPIABI_BXOR MPIABI_CHAR MPIABI_CHARACTER MPIABI_COMM_DUP_FN MPIABI_COMM_NULL_COPY_FN
    MPIABI_COMM_NULL_DELETE_FN MPIABI_COMM_SELF MPIABI_COMPLEX MPIABI_COMPLEX16 MPIABI_COMPLEX32 MPIABI_COMPLEX8
    MPIABI_CONVERSION_FN_NULL MPIABI_COUNT MPIABI_CXX_BOOL MPIABI_CXX_DOUBLE_COMPLEX MPIABI_CXX_FLOAT_COMPLEX
    MPIABI_CXX_LONG_DOUBLE_COMPLEX MPIABI_C_BOOL MPIABI_C_FLOAT_COMPLEX MPIABI_C_LONG_DOUBLE_COMPLEX MPIABI_DATATYPE_NULL
    MPIABI_DISPLACEMENT_CURRENT MPIABI_DOUBLE_COMPLEX MPIABI_DOUBLE_INT MPIABI_DOUBLE_PRECISION MPIABI_DUP_FN
    MPIABI_ERRCODES_IGNORE MPIABI_ERRHANDLER_NULL MPIABI_ERRORS_ARE_FATAL MPIABI_ERRORS_RETURN MPIABI_FILE_NULL MPIABI_FLOAT_INT
    MPIABI_F_STATUSES_IGNORE MPIABI_F_STATUS_IGNORE MPIABI_GROUP_EMPTY MPIABI_GROUP_NULL MPIABI_INFO_ENV MPIABI_INFO_NULL
    MPIABI_INT MPIABI_INTEGER MPIABI_INTEGER1 MPIABI_INTEGER2 MPIABI_INTEGER4 MPIABI_INTEGER8 MPIABI_IN_PLACE MPIABI_LAND
    MPIABI_LOGICAL MPIABI_LONG MPIABI_LONG_DOUBLE MPIABI_LONG_DOUBLE_INT MPIABI_LONG_INT MPIABI_LONG_LONG MPIABI_LONG_LONG_INT
    MPIABI_LOR MPIABI_LXOR MPIABI_MAXLOC MPIABI_MESSAGE_NO_PROC MPIABI_MESSAGE_NULL MPIABI_MINLOC MPIABI_NO_OP
    MPIABI_NULL_COPY_FN MPIABI_NULL_DELETE_FN MPIABI_OFFSET MPIABI_OP_NULL MPIABI_PACKED MPIABI_REAL MPIABI_REAL16 MPIABI_REAL4
    MPIABI_REAL8 MPIABI_REPLACE MPIABI_SHORT MPIABI_SHORT_INT MPIABI_SIGNED_CHAR MPIABI_STATUSES_IGNORE MPIABI_TYPE_DUP_FN
    MPIABI_TYPE_NULL_COPY_FN MPIABI_TYPE_NULL_DELETE_FN MPIABI_UNSIGNED MPIABI_UNSIGNED_CHAR MPIABI_UNSIGNED_LONG
    MPIABI_UNSIGNED_LONG_LONG MPIABI_UNSIGNED_SHORT MPIABI_UNWEIGHTED MPIABI_WCHAR MPIABI_WEIGHTS_EMPTY MPIABI_WIN_DUP_FN
    MPIABI_WIN_NULL MPIABI_WIN_NULL_COPY_FN MPIABI_WIN_NULL_DELETE_FN
}
